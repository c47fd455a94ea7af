"""Makes the helpers beside these tests importable (tests are imported by path, not as a package)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
