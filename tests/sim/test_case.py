"""Worlds with failures keep what must hold; and what does not hold is found, named by its seed and made
small.
"""

import msgspec
import pytest
from sim_case import Case, draw_case, draw_faults, failure, run_case, shrink

from penstock.kv.cache.block_pool import BlockPool
from penstock.policy.lifecycle.control import FlowControl
from penstock.sim.world.faults import FaultKind, InjectedFault


@pytest.mark.parametrize("seed", [4, 6])
def test_whatever_fails_every_request_ends_once_and_nothing_is_left(seed) -> None:
    case = draw_case(seed)
    case = msgspec.structs.replace(case, requests=case.requests[:60])
    result = run_case(case, every=1024)
    assert result.counters.ended == result.counters.arrived >= len(case.requests)
    assert result.digest == run_case(case, every=4096).digest


def test_a_case_is_json_and_back() -> None:
    case = draw_case(5)
    assert case.faults
    again = msgspec.json.decode(msgspec.json.encode(case), type=Case)
    assert (again.seed, again.shape, again.faults) == (case.seed, case.shape, case.faults)
    assert msgspec.json.encode(again) == msgspec.json.encode(case)


def test_each_run_draws_its_own_mix() -> None:
    mixes = [{fault.kind for fault in draw_faults(seed, until_ns=10**10, requests=50)} for seed in range(40)]
    assert len({frozenset(mix) for mix in mixes}) > 30
    assert set().union(*mixes) == set(FaultKind)
    for seed in range(40):
        for fault in draw_faults(seed, until_ns=10**10, requests=50):
            assert 0 < fault.at_ns < fault.until_ns <= 10**10


def test_a_leak_is_found_and_shrunk(monkeypatch) -> None:
    """A block of some requests is not given back: a case of that needs one request and no fault."""
    release = BlockPool.free

    def leaky(self, blocks) -> None:
        release(self, blocks[1:] if len(blocks) % 2 == 1 else blocks)

    monkeypatch.setattr(BlockPool, "free", leaky)
    case = draw_case(10)
    case = msgspec.structs.replace(case, requests=case.requests[:24])
    assert "references do not add up" in failure(case)
    small = shrink(case, lambda tried: bool(failure(tried)), runs_max=60)
    assert failure(small)
    assert len(small.requests) <= 3
    assert not small.faults


def test_a_lost_end_is_found(monkeypatch) -> None:
    """A request that is cancelled while it runs is forgotten by its gateway."""
    cancel = FlowControl.cancel

    def forgetful(self, now_ns, request_id):
        flow = self.request(request_id)
        return None if flow is not None and flow.attempts else cancel(self, now_ns, request_id)

    monkeypatch.setattr(FlowControl, "cancel", forgetful)
    case = draw_case(6)
    requests = tuple(
        msgspec.structs.replace(each, cancel_at_ns=each.at_ns + 3 * 10**8) for each in case.requests[:20]
    )
    stuck = (InjectedFault(FaultKind.STUCK, case.requests[0].at_ns, 10**10, 0),)
    assert "never ended" in failure(msgspec.structs.replace(case, requests=requests, faults=stuck))
