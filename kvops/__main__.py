"""``python -m kvops`` is ``kvops``."""

import sys

from kvops.cli.main import main

sys.exit(main())
