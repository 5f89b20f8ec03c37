"""Benches, a folder for each part. What stands in for others is the tests' (tests/doubles)."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "doubles"))
