"""A burst that an idle, fast worker could answer in time is not refused: closed-loop callers, each asking
again when it was answered.
"""

import pytest

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.config.engine_settings import EngineSettings
from penstock.config.routing import TTFT_TARGET_MS
from penstock.planning.step_time import LinearStepTime
from penstock.policy.flow import Outcome
from penstock.sim.traffic.prompts import RequestRecord, Segment, SimRequest
from penstock.sim.world.run import PoolSpec, SimWorkerSpec, WorldSpec
from penstock.sim.world.world import World

PROMPT, ANSWER, EACH, STEP_TOKENS = 512, 128, 3, 2048
FIXED_NS = 1_400_000
THINK_NS = NS_PER_MS


class Callers:
    """Some that ask one at a time, which teaches the gateway what a prompt alone takes; then many at once."""

    def __init__(self, count: int, total_ms: float, warm_up: int) -> None:
        """The prompts of the burst take `total_ms` together."""
        steps = count * PROMPT / STEP_TOKENS
        token_ns = (total_ms * NS_PER_MS - steps * FIXED_NS) / (count * PROMPT)
        step_time = LinearStepTime(
            fixed_ns=FIXED_NS, row_ns=10_000, prefill_ns=max(1, round(token_ns)), kv_ps=20
        )
        engine = EngineSettings(step_tokens=STEP_TOKENS, max_running=256)
        worker = SimWorkerSpec(step_time=step_time, engine=engine, num_blocks=65_536, kind="fast")
        self._left = dict.fromkeys((f"c{i}" for i in range(count)), EACH)
        self._num_asked, self.records = 0, list[RequestRecord]()
        start_ns = (warm_up + 2) * NS_PER_S
        alone = [self._request(f"w{i}", (1 + i) * NS_PER_S) for i in range(warm_up)]
        at_once = [self._next(name, start_ns) for name in self._left]
        spec = WorldSpec(seed=1, pools=(PoolSpec(worker=worker, count=1),))
        self._world = World(spec, [*alone, *at_once], on_record=self._on_record)

    def run(self) -> list[RequestRecord]:
        self._world.run()
        return self.records

    def _on_record(self, record: RequestRecord) -> None:
        name = record.id.partition("-")[0]
        if name not in self._left:
            return
        self.records.append(record)
        if self._left[name]:
            now_ns = self._world.timeline.now_ns()
            self._world.ask_at(now_ns + THINK_NS, self._next(name, now_ns + THINK_NS))

    def _next(self, name: str, at_ns: int) -> SimRequest:
        self._left[name] -= 1
        return self._request(f"{name}-{self._left[name]}", at_ns)

    def _request(self, name: str, at_ns: int) -> SimRequest:
        self._num_asked += 1
        prompt = (Segment(self._num_asked, PROMPT),)
        return SimRequest(id=name, at_ns=at_ns, prompt=prompt, output_tokens=ANSWER)


@pytest.mark.parametrize("warm_up", [0, 8])
@pytest.mark.parametrize(("count", "total_ms"), [(64, 330), (64, 420), (256, 330), (256, 400)])
def test_a_burst_that_could_be_answered_in_time_is_let_in(count: int, total_ms: float, warm_up: int) -> None:
    records = Callers(count, total_ms, warm_up).run()
    assert len(records) == count * EACH
    refused = [record for record in records if record.outcome is not Outcome.FINISHED]
    assert len(refused) <= 0.02 * len(records)
    late = [r for r in records if r.first_ns >= 0 and r.ttft_ns > TTFT_TARGET_MS * NS_PER_MS]
    assert len(late) <= 0.02 * len(records)


def test_a_burst_that_cannot_be_answered_in_time_is_not_all_let_in() -> None:
    records = Callers(256, 3000, 8).run()
    done = [r for r in records if r.outcome is Outcome.FINISHED]
    assert 0 < len(done) < len(records)
    in_time = sum(r.ttft_ns <= TTFT_TARGET_MS * NS_PER_MS for r in done)
    assert in_time >= 0.75 * len(done)
