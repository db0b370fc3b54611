"""The command line: one thin file per command; flags are derived from the configuration dataclasses."""
