"""Simulated gateways act on failures with the product's own parts: streams move, breakers open and close,
quarantine convicts.
"""

from dataclasses import replace

import msgspec
import pytest
from sim_checks import Checks
from sim_load import poisson

from penstock.clock import NS_PER_S
from penstock.config.fleet import HealthConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.policy.flow import Outcome
from penstock.policy.limits.rate_limit import RateTerms
from penstock.policy.resilience.worker_state import BreakerState
from penstock.sim.world.faults import Chaos, FaultKind, InjectedFault
from penstock.sim.world.gateway import SimGateway
from penstock.sim.world.run import SimWorkerSpec
from penstock.sim.world.world import PoolSpec, World, WorldSpec

SLICED = Config(
    limits=RateTerms(slice_tokens=16),
    admission=AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=()),
)
"""Nothing is promised, so that nothing is refused."""


def fault(
    kind: FaultKind, from_s: float, to_s: float, *, target: int = 0, amount: float = 1.0
) -> InjectedFault:
    return InjectedFault(kind, int(from_s * NS_PER_S), int(to_s * NS_PER_S), target, amount)


def run(requests, faults, *, config=SLICED, workers=3, fast_forwards=True, **worker):
    spec = WorldSpec(
        config=config,
        pools=(
            PoolSpec(
                count=workers,
                worker=SimWorkerSpec(fast_forwards=fast_forwards, cold_start_ns=NS_PER_S, **worker),
            ),
        ),
    )
    world = World(spec, requests)
    Chaos(world, faults)
    checks = Checks(world)
    result = world.run()
    checks.finish(result)
    return world, result


@pytest.mark.parametrize("kind", [FaultKind.WORKER_CRASH, FaultKind.LINK_RESET, FaultKind.SPOT])
def test_a_stream_whose_worker_is_lost_goes_on_behind_its_last_token(kind) -> None:
    requests = list(poisson(1, 12, 2, output=300))
    lost = [fault(kind, 1.5, 1.6)]
    world, result = run(requests, lost)
    stayed = run(requests, ())[1]
    assert {record.outcome for record in result.records} == {Outcome.FINISHED}
    moved = [record for record in result.records if record.migrations]
    assert len(moved) >= 3
    lengths = {request.id: request.output_tokens for request in requests}
    assert all(record.completion_tokens == lengths[record.id] for record in result.records)
    assert result.counters.migrations == sum(record.migrations for record in result.records)
    # Nothing was begun again: beside what was in the air, the workers made each token once.
    slack = len(requests) * (1 if kind is not FaultKind.LINK_RESET else SLICED.limits.slice_tokens)
    assert 0 <= result.counters.generated_tokens - result.counters.completion_tokens <= slack, (
        "what was told is not made again"
    )
    # The prompt counts as it was first read, also if the second worker found more or less of it.
    first_read = {record.id: record.cached_tokens for record in stayed.records}
    assert any(record.cached_tokens == first_read[record.id] for record in moved)
    assert not any(gateway.policies.health.blocked(result.virtual_ns, "model") for gateway in world.gateways)
    stepped = run(requests, lost, fast_forwards=False)[1]
    assert stepped.digest == result.digest


def test_a_stream_of_a_foreign_engine_that_dies_continues_once_and_counts_once() -> None:
    requests = list(poisson(1, 12, 2, output=300))
    crash = fault(FaultKind.WORKER_CRASH, 1.5, 1.6)
    _, result = run(requests, [crash], is_external=True)
    assert {record.outcome for record in result.records} == {Outcome.FINISHED}
    moved = [record for record in result.records if record.migrations]
    assert len(moved) >= 3
    lengths = {request.id: request.output_tokens for request in requests}
    assert all(record.completion_tokens == lengths[record.id] for record in result.records)
    assert all((record.migrations, record.attempts) == (1, 2) for record in moved)
    # Whether a request is what ended its engine is not known, so it gets no third one.
    again = [crash, *(fault(FaultKind.WORKER_CRASH, at_s, at_s + 0.1) for at_s in (1.9, 1.95))]
    _, result = run(requests, again, is_external=True)
    broken = [record for record in result.records if record.outcome is Outcome.FAILED]
    assert broken
    assert {(record.reason, record.migrations) for record in broken} == {("StreamBroken", 1)}
    assert {record.migrations for record in result.records} == {0, 1}


def test_a_stream_of_a_foreign_engine_that_returns_text_only_ends_with_it() -> None:
    requests = list(poisson(1, 12, 2, output=300))
    _, result = run(requests, [fault(FaultKind.WORKER_CRASH, 1.5, 1.6)], is_external=True, resumes=False)
    broken = [record for record in result.records if record.outcome is Outcome.FAILED]
    assert broken
    assert {(record.reason, record.migrations) for record in broken} == {("StreamBroken", 0)}
    assert all(record.first_ns >= 0 and 0 < record.completion_tokens < 300 for record in broken)


def test_a_deployment_that_hangs_from_the_first_request_on_holds_each_for_what_any_engine_takes() -> None:
    requests = list(poisson(1, 3, 2, output=20))
    hangs = [fault(FaultKind.WORKER_SLOW, 0, 300, amount=100_000.0)]
    waits: dict[float, float] = {}
    for first_token_s in (4.0, 0.0):
        config = msgspec.structs.replace(SLICED, health=HealthConfig(first_token_s=first_token_s, probe_s=0))
        _, result = run(requests, hangs, config=config, workers=2, is_external=True)
        assert {record.outcome for record in result.records} == {Outcome.FINISHED}
        waits[first_token_s] = max(record.first_ns - record.at_ns for record in result.records) / NS_PER_S
    assert 4 < waits[4.0] < 8, "then the other one answers"
    assert waits[0.0] > 60, "with no bound it is waited for"


def test_without_migrations_a_stream_ends_with_its_worker() -> None:
    config = msgspec.structs.replace(SLICED, health=HealthConfig(migrations_max=0))
    _, result = run(poisson(1, 12, 2, output=300), [fault(FaultKind.WORKER_CRASH, 1.5, 1.6)], config=config)
    failed = [record for record in result.records if record.outcome is Outcome.FAILED]
    assert failed
    assert {record.reason for record in failed} == {"StreamBroken"}
    assert all(record.first_ns >= 0 and record.prompt_tokens for record in failed)


def test_who_fails_everything_is_left_alone_and_used_again_when_it_is_well() -> None:
    requests = list(poisson(2, 12, 24))
    world, result = run(requests, [fault(FaultKind.GRAY, 4, 9)])
    (bad, *_) = world.members
    tried = [record for record in result.records if record.attempts > 1]
    unanswered = [record for record in result.records if record.outcome is not Outcome.FINISHED]
    # As many as it takes to judge, and those that look whether it is well again.
    assert 5 <= len(tried) + len(unanswered) <= 16
    late = [record for record in result.records if record.at_ns > 20 * NS_PER_S]
    assert {record.outcome for record in late} == {Outcome.FINISHED}
    assert bad in {record.worker for record in late}
    (health,) = (gateway.policies.health for gateway in world.gateways)
    assert {state for _, _, state in health.states()} == {BreakerState.CLOSED}


def test_who_turns_slow_alone_gets_nothing_new() -> None:
    requests = list(poisson(3, 15, 14))
    slow = [fault(FaultKind.WORKER_SLOW, 5, 13, amount=40)]
    (bad, *_), result = (part if i else part.members for i, part in enumerate(run(requests, slow)))
    assert {record.outcome for record in result.records} == {Outcome.FINISHED}
    during = [record for record in result.records if 10 < record.at_ns / NS_PER_S < 13]
    assert sum(record.worker == bad for record in during) <= 2 < len(during) // 4


def test_a_prompt_that_ends_workers_ends_two() -> None:
    requests = list(poisson(4, 4, 12, output=20))
    poison = requests[12]
    again = [
        msgspec.structs.replace(poison, id=f"again{i}", at_ns=poison.at_ns + i * NS_PER_S, poison=True)
        for i in range(1, 6)
    ]
    mixed = sorted([*requests, *again], key=lambda request: request.at_ns)
    mixed[mixed.index(poison)] = msgspec.structs.replace(poison, poison=True)
    world, result = run(mixed, (), workers=4)
    records = {record.id: record for record in result.records}
    assert len(world.members) == 4
    assert world._num_workers == 4 + 2
    assert (records[poison.id].outcome, records[poison.id].reason) == (Outcome.EVICTED, "quarantine")
    assert {records[each.id].reason for each in again} == {"quarantine"}
    others = [record for record in result.records if record.id not in {poison.id, *(a.id for a in again)}]
    assert {record.outcome for record in others} == {Outcome.FINISHED}


def _drained_with_late_messages(seed: int) -> None:
    """A worker to which messages take two seconds is told to leave while a request is on its way there."""
    world = World(replace(WorldSpec(seed=seed), pools=(PoolSpec(count=2),)), poisson(seed, 10, 4))
    Checks(world)
    late = [fault(FaultKind.LATE, 1, 3, amount=2000), fault(FaultKind.SPOT, 2, 9)]
    Chaos(world, late)
    assert {record.outcome for record in world.run().records} == {Outcome.FINISHED}


def test_seed_62_a_drained_worker_stays_while_requests_are_on_a_slow_link_to_it(monkeypatch) -> None:
    _drained_with_late_messages(62)
    monkeypatch.setattr(SimGateway, "has_streams", lambda *_: False)
    with pytest.raises(AssertionError, match=r"the drain of model-0 cut \d+ streams"):
        _drained_with_late_messages(62)
