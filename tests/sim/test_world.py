"""The whole simulation: everything ends, in the same way each time."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import sim_load
from sim_load import poisson

from penstock.clock import NS_PER_S
from penstock.config.ledger import PricesConfig
from penstock.config.tree import Config
from penstock.policy.flow import Outcome, UsageRecord
from penstock.sim.world.world import PoolSpec, World, WorldSpec

SMALL = WorldSpec(pools=(PoolSpec(count=2),))


def test_every_request_is_answered_by_the_real_parts() -> None:
    requests = list(poisson(1, 10, 10))
    result = World(SMALL, requests).run()
    assert [record.outcome for record in result.records] == [Outcome.FINISHED] * len(requests)
    counters = result.counters
    assert counters.records == counters.arrived == len(requests)
    assert (
        counters.completion_tokens
        == counters.generated_tokens
        == sum(each.output_tokens for each in requests)
    )
    assert counters.prompt_tokens == sum(each.prompt_tokens for each in requests)
    # Every tenant's second request finds the blocks of its first 100 tokens.
    assert counters.cached_tokens >= 96 * (len(requests) - 16)
    for record, request in (
        (record, request) for request in requests for record in result.records if record.id == request.id
    ):
        assert record.at_ns == request.at_ns < record.first_ns <= record.end_ns


def test_the_same_seed_is_the_same_run_whatever_python_hashes() -> None:
    digests = {
        subprocess.run(
            [sys.executable, sim_load.__file__],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert digests == {
        World(WorldSpec(seed=3, pools=(PoolSpec(count=3),), gateways=2), poisson(3, 12, 3)).run().digest
        + "\n"
    }
    assert digests != {World(SMALL, poisson(4, 12, 3)).run().digest + "\n"}


def test_the_number_of_workers_follows_its_schedule_and_no_stream_is_lost() -> None:
    schedule = ((2 * NS_PER_S, 1), (4 * NS_PER_S, 3), (6 * NS_PER_S, 1))
    spec = replace(SMALL, pools=(PoolSpec(count=2, schedule=schedule),))
    world = World(spec, poisson(2, 10, 9))
    result = world.run()
    assert {record.outcome for record in result.records} == {Outcome.FINISHED}
    assert {record.worker for record in result.records} == {"model-0", "model-1", "model-2", "model-3"}
    assert len(world.members) == 1


def test_the_workers_bill_is_requests_idle_reserve_and_platform() -> None:
    """Workers come and go with and without work, clients leave: price * wall seconds of every worker."""
    schedule = ((2 * NS_PER_S, 1), (4 * NS_PER_S, 3), (6 * NS_PER_S, 1))
    config = Config(prices=PricesConfig(accelerators={"*": 3600.0}))  # A millionth is a microsecond.
    spec = replace(SMALL, config=config, pools=(PoolSpec(count=2, schedule=schedule),))
    world = World(spec, poisson(2, 10, 9, output=400, cancel_at_ns=3 * NS_PER_S))
    billed = Billed(world)
    result = world.run()
    found = world.gateways[0].meters.costs(result.virtual_ns)["model"]
    assert found.busy + found.idle + found.reserve == pytest.approx(result.counters.ready_ns / 1000, rel=1e-3)
    assert found.charged == sum(record.accelerator_cost_micros for record in billed.records)
    assert 0 <= found.busy - found.charged <= len(billed.records)
    assert min(found.charged, found.idle, found.reserve) > 0


class Billed:
    """Takes the ledger's lines, and passes nothing on."""

    def __init__(self, world: World) -> None:
        self.records = list[UsageRecord]()
        world.watcher = self

    def billed(self, record: UsageRecord) -> None:
        self.records.append(record)

    def __getattr__(self, name: str):
        return lambda *_: None


def test_clients_leave_before_and_after_their_first_token() -> None:
    impatient = World(SMALL, poisson(5, 10, 5, patience_ns=1)).run()
    assert {record.outcome for record in impatient.records} == {Outcome.CANCELLED}
    # An abort is looked at between two steps: one may have ended with a first token.
    assert all(record.completion_tokens <= 1 for record in impatient.records)
    leaving = World(SMALL, poisson(5, 10, 5, output=400, cancel_at_ns=3 * NS_PER_S)).run()
    assert {record.outcome for record in leaving.records} == {Outcome.CANCELLED, Outcome.FINISHED}
    assert any(record.first_ns >= 0 for record in leaving.records if record.outcome is Outcome.CANCELLED)
