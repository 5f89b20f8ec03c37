"""Whoever asks through whichever gateway process: the requests pay for the workers' time once."""

from array import array
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runner import ScriptedRunner

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.engine_settings import EngineSettings
from penstock.config.ledger import PricesConfig
from penstock.engine.core import EngineCore, build_core
from penstock.policy.flow import RequestFacts
from penstock.policy.lifecycle.machine_costs import Meters
from penstock.policy.limits.price import PriceList
from penstock.policy.request import request_of
from penstock.protocol.worker import Submit
from penstock.rng import stream
from penstock.schedule.plan import StepPlan, StepResult
from penstock.telemetry.metrics import Metrics
from penstock.telemetry.pages import merged
from penstock.types import RequestId, SamplingParams, Usage, WorkerId

WORKER = WorkerId("w")
PRICES = PriceList(PricesConfig(accelerators={"m": 3600.0}))
"""A millionth is a microsecond."""
MS = 10**6


class SlowRunner(ScriptedRunner):
    def __init__(self, clock: ManualClock, times_ns: Iterator[int]) -> None:
        super().__init__()
        self._step_clock, self._times_ns = clock, times_ns

    def run(self, plan: StepPlan) -> StepResult:
        self._step_clock.advance(next(self._times_ns))
        return super().run(plan)


class Process:
    """What one gateway process knows of a worker's time."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self.paid = clock, 0
        self.meters = Meters(PRICES, is_shared=True)
        self.meters.has_worker(clock.now_ns(), "m", WORKER, tells=True)

    def hear(self, engine: EngineCore) -> None:
        stats = engine.stats()
        num = stats.running + stats.waiting
        self.meters.reported(self._clock.now_ns(), WORKER, busy_ns=stats.busy_ns, num_requests=num)

    def settle(self, request_id: RequestId, usage: Usage) -> None:
        facts = RequestFacts(id=request_id, route="m", prompt_tokens=1, max_tokens=1)
        request = request_of(facts, 0, model_queue=None)
        request.usage = usage
        self.paid += self.meters.settled(self._clock.now_ns(), request, 0)

    def metrics(self) -> bytes:
        metrics = Metrics(["m"], version="0")
        metrics.accelerator_costs(self.meters.costs(self._clock.now_ns()))
        return metrics.render()


@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_processes_bills_are_one_bill(data: st.DataObject) -> None:
    clock = ManualClock()
    draw = stream(data.draw(st.integers(0, 99)), "steps")
    times_ns = iter(lambda: draw.randrange(1, 300 * MS), 0)
    engine = build_core(SlowRunner(clock, times_ns), EngineSettings(), b"k" * 32, clock)
    processes = [Process(clock) for _ in range(3)]

    def step() -> None:
        for owner, outputs in engine.step().items():
            for output in outputs:
                if output.finish is not None:
                    processes[owner].settle(output.request_id, output.finish.usage)
        for process in processes:
            process.hear(engine)

    for process in processes:
        process.hear(engine)
    for number in range(data.draw(st.integers(1, 10))):
        match data.draw(st.sampled_from(["submit", "submit", "step", "idle"])):
            case "submit":
                engine.submit(data.draw(st.integers(0, 2)), submit(f"r{number}", data), clock.now_ns())
            case "idle" if not engine.has_work:
                clock.advance(data.draw(st.integers(1, 5 * NS_PER_S)))
                for process in processes:
                    process.meters.tick(clock.now_ns())
            case _:
                step()
    while engine.has_work:
        step()
    for process in processes:
        process.hear(engine)
    numbers = amounts(merged([process.metrics() for process in processes]))
    bill, busy = clock.now_ns() / NS_PER_S, engine.stats().busy_ns / NS_PER_S
    paid = sum(process.paid for process in processes) / MS
    assert abs(numbers.get("busy", 0.0) - busy) < 2e-6
    assert abs(numbers.get("busy", 0.0) + numbers.get("idle", 0.0) - bill) < 3e-6, "idle time is idle once"
    assert abs(numbers.get("charged", 0.0) - paid) < 1e-6
    assert 0 <= busy - paid < 12e-6, "no more than a millionth for each request is left over"


def test_two_processes_with_a_request_each_in_the_same_second_pay_half_each() -> None:
    clock = ManualClock()
    engine = build_core(SlowRunner(clock, iter([NS_PER_S])), EngineSettings(), b"k" * 32, clock)
    processes = [Process(clock) for _ in range(2)]
    for owner in range(2):
        message = Submit(
            request_id=RequestId(f"r{owner}"),
            prompt=array("i", [40 + owner, 50]).tobytes(),
            sampling=SamplingParams(max_tokens=1),
        )
        engine.submit(owner, message, 0)
    for owner, (output,) in engine.step().items():
        assert output.finish is not None
        processes[owner].settle(output.request_id, output.finish.usage)
    assert [process.paid for process in processes] == [500_000, 500_000]


def submit(name: str, data: st.DataObject) -> Submit:
    return Submit(
        request_id=RequestId(name),
        prompt=array("i", range(32, 32 + data.draw(st.integers(1, 60)))).tobytes(),
        sampling=SamplingParams(max_tokens=data.draw(st.integers(1, 6))),
    )


def amounts(text: bytes) -> dict[str, float]:
    """What `/metrics` says the worker has cost, by part."""
    found: dict[str, float] = {}
    for line in text.decode().splitlines():
        name, _, value = line.rpartition(" ")
        if name.startswith("penstock_accelerator_cost_total"):
            found[name.split('part="')[1].split('"')[0]] = float(value)
        elif name.startswith("penstock_accelerator_charged_total"):
            found["charged"] = float(value)
    return found
