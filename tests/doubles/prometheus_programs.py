"""Where Prometheus' programs are, if they are here."""

import os
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "observability" / "rules.yaml"
BIN = Path(os.environ.get("VENV", ROOT / ".venv")) / "prometheus" / "bin"


def program(name: str) -> str:
    """Its path; the test is skipped where it is missing."""
    found = shutil.which(name, path=f"{BIN.absolute()}{os.pathsep}{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name} here: scripts/install_prometheus.sh unpacks it")
    return found
