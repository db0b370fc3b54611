"""`python -m ridgeline` is `ridgeline`."""

import sys

from ridgeline.cli.main import main

sys.exit(main())
