"""Makes the `training` package importable: it lives beside `penstock` but is not installed with it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
