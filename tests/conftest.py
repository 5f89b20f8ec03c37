import os
from pathlib import Path

import pytest

# GPU kernels run in Triton's interpreter, on the CPU. Triton reads this when it is imported, which others do too: so here.
os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ledgers of servers that tests start are kept here, not in the developer's home."""
    directory = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(directory)
    return directory
