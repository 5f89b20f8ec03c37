"""The rollouts' bench keeps its run of the simulator for further calls, and takes no other one for it."""

from pathlib import Path

import msgspec
import pytest

from bench.policy.rollout import Ended, Run, kept
from penstock.policy.rollout.evidence import Observation


def test_a_kept_run_of_another_length_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.msgpack"
    seen = Observation("", is_canary=False, group=0, tokens=8)
    path.write_bytes(msgspec.msgpack.encode(Run(3600.0, [Ended("s1", 5, seen)])))
    assert kept(path, 3600.0) == [Ended("s1", 5, seen)]
    with pytest.raises(SystemExit, match="has 1 hours of requests"):
        kept(path, 4500.0)
