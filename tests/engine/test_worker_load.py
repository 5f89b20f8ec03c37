"""The order in which a worker loads: memory is planned before anything else takes some."""

import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest

from penstock.clock import SystemClock
from penstock.engine import worker
from penstock.errors import CheckpointError
from penstock.protocol.address import WorkerLaunch
from penstock.protocol.worker import LOADING_WEIGHTS


@pytest.fixture(autouse=True)
def unfrozen():
    """Importing a runner hides all that there is from the collector: in this process it would stay so."""
    yield
    gc.unfreeze()


@pytest.mark.parametrize("has_grammars", [False, True])
def test_the_vocabulary_is_begun_when_weights_are_read_and_once(monkeypatch, has_grammars):
    begun, seen, shown, stages = [], [], [], []
    monkeypatch.setattr(worker, "begin_vocabulary", begun.append)

    def factory(model_path, config, clock, progress):
        progress("reading the configuration", 0, 0)
        for done in (0, 1, 2):
            seen.append(len(begun))
            progress(LOADING_WEIGHTS, done, 2)
        seen.append(len(begun))
        raise CheckpointError("far enough")

    runners = ModuleType("runners_of_this_test")
    runners.factory = factory
    monkeypatch.setitem(sys.modules, runners.__name__, runners)
    server = SimpleNamespace(announce=shown.append, grammars=object() if has_grammars else None)
    launch = WorkerLaunch(
        address="unix:/nowhere", model_path="m", model_name="m", hash_key=b"",
        runner="runners_of_this_test:factory",
    )  # fmt: skip
    with pytest.raises(CheckpointError):
        worker.load(launch, server, SystemClock(), stages.append)
    count = 0 if has_grammars else 1
    assert seen == [0, 0, count, count]
    assert [each.stage for each in shown][-1] == LOADING_WEIGHTS
    assert stages == [each.stage for each in shown]
