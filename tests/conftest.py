import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# GPU kernels run in Triton's interpreter, on the CPU. Triton reads this when it is imported, which others do too: so here.
os.environ["TRITON_INTERPRET"] = "1"

# `make test` runs a process per core: torch's threads would only take turns with the others'. Read at its import too.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

# No test is about how long it takes: a busy machine must not fail one.
settings.register_profile("penstock", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("penstock")


@pytest.fixture(scope="session", autouse=True)
def state_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ledgers of servers that tests start are kept here, not in the developer's home."""
    directory = tmp_path_factory.mktemp("state")
    os.environ["XDG_STATE_HOME"] = str(directory)
    return directory
