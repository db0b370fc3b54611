"""The version of this package, for modules that `ridgeline` itself imports."""

VERSION = "0.1.0"
