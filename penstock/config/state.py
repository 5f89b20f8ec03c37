"""Where a user's state is kept between runs on this machine."""

import os
from collections.abc import Mapping
from pathlib import Path


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """PENSTOCK_STATE_DIR, else what the XDG base directory specification says, for this user."""
    if chosen := environ.get("PENSTOCK_STATE_DIR"):
        return Path(chosen)
    base = environ.get("XDG_STATE_HOME")
    state = Path(base) if base and Path(base).is_absolute() else Path.home() / ".local" / "state"
    return state / "penstock"
