"""First tokens and gaps between tokens: a fixed prefill budget beside the one that keeps a latency target.

    python bench/prefill_budget.py [--noise 0.1] [--seed 0] [--json FILE]

The real scheduler on a virtual clock: a step takes what a scripted law says (the longer of reading the
weights and computing the tokens, plus reading the KV), times a random hiccup. Laws are rough pictures of
machines, so the figures to read are the ratios between the two policies, which see the same arrivals and the
same hiccups.

    burst      32 requests of 110 tokens arrive together (vLLM's way: everyone is prefilled at once)
    long       a prompt of 1,500 tokens arrives while 8 streams decode
    closed N   N clients, each sends 110 tokens, reads 64, and sends again
"""

import argparse
import statistics
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from provenance import add_json_option, write_result

from penstock import rng
from penstock.clock import NS_PER_MS, ManualClock
from penstock.kv.cache.manager import KVManager
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import Sampled, StepPlan, StepResult
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget, PromptShare
from penstock.schedule.queue import FCFSQueue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.schedule.step_time import StepLoad
from penstock.types import RequestId, SamplingParams


class Everything(PromptShare):
    """The fixed budget: prompts take all that is left of the step's tokens."""

    def grant(self, num_computed: int, num_pending: int, tokens_left: int) -> int:
        return min(num_pending, tokens_left)


class FixedBudget(PrefillBudget):
    """What engines do by default: the step's token budget is the only bound."""

    def open(
        self, decoding: StepLoad, priorities: set[int], num_prompts: int, waited_ns: int = 0
    ) -> PromptShare:
        return Everything(self.model, decoding, 0.0, num_prompts, 1)


@dataclass(frozen=True)
class Law:
    """Nanoseconds of a step: host and launch, reading weights, computing a token, reading KV of a token."""

    name: str
    host_ns: float
    weights_ns: float
    token_ns: float
    kv_ns: float

    def step_ns(self, plan: StepPlan) -> float:
        load = StepLoad.of(plan.work)
        compute = max(self.weights_ns, self.token_ns * load.num_tokens)
        return self.host_ns + compute + self.kv_ns * (load.kv_read + 0.2 * load.chunk_pairs)


LAWS = (
    Law("0.5B on 2 cores", 1e6, 30e6, 1.5e6, 600),
    Law("28M on 2 cores", 0.4e6, 1.6e6, 0.12e6, 60),
    Law("8B on a GPU", 1e6, 3.6e6, 0.03e6, 30),
)


@dataclass
class Stream:
    """When a request came, and when its tokens did."""

    asked_ns: int
    got_ns: list[int] = field(default_factory=list)

    @property
    def ttft_ns(self) -> int:
        return self.got_ns[0] - self.asked_ns

    def gaps(self, after_ns: int = 0) -> Iterator[int]:
        for before, now in zip(self.got_ns, self.got_ns[1:], strict=False):
            if before >= after_ns:
                yield now - before


class Machine:
    """One scheduler on one scripted machine."""

    def __init__(self, law: Law, prefill: PrefillBudget, noise: float, seed: int, step_tokens: int) -> None:
        self.clock, self.law, self.noise = ManualClock(now_ns=1), law, noise
        self.chance = rng.stream(seed, "hiccups")
        limits = BatchLimits(step_tokens=step_tokens, max_running=64, max_model_len=4096)
        manager = KVManager.without_prefix_cache(4096)
        self.scheduler = Scheduler(limits, manager, self.clock, FCFSQueue(100), prefill)
        self.streams: dict[RequestId, Stream] = {}

    def ask(self, prompt: int, answer: int) -> Stream:
        name = RequestId(f"r{len(self.streams)}")
        tokens = array("i", [7]) * prompt
        request = Request(request_id=name, tokens=tokens, sampling=SamplingParams(max_tokens=answer))
        self.scheduler.submit(request)
        stream = self.streams[name] = Stream(self.clock.now_ns())
        return stream

    def step(self) -> list[RequestId]:
        """Run a step; the requests that ended in it."""
        plan = self.scheduler.schedule()
        assert plan is not None
        self.clock.advance(round(self.law.step_ns(plan) * (1 + self.noise * self.chance.expovariate(1))))
        sampled = tuple(Sampled(work.row, 7) for work in plan.work if work.samples)
        outputs = self.scheduler.apply(StepResult(plan.step, sampled)).outputs
        for output in outputs:
            self.streams[output.request_id].got_ns.append(self.clock.now_ns())
        return [output.request_id for output in outputs if output.finish is not None]

    def warm_up(self) -> None:
        """Some ordinary requests, so that neither policy starts from nothing."""
        for count in (1, 2, 4):
            for _ in range(count):
                self.ask(60 * count, 20)
            self.drain()
        self.streams.clear()

    def drain(self) -> None:
        while self.scheduler.has_work:
            self.step()


@dataclass(frozen=True)
class Figures:
    """One scenario under one policy; gaps between tokens: median and 99th percentile."""

    ttft_ns: float
    itl_p50_ns: float
    itl_p99_ns: float
    total_ns: float

    @classmethod
    def of(cls, machine: Machine, streams: list[Stream], watched: list[Stream], since_ns: int) -> "Figures":
        gaps = sorted(gap for stream in watched for gap in stream.gaps(since_ns))
        return cls(
            statistics.median(stream.ttft_ns for stream in streams),
            statistics.median(gaps),
            gaps[-1 - len(gaps) // 100],
            machine.clock.now_ns() - since_ns,
        )


def burst(machine: Machine) -> Figures:
    start_ns = machine.clock.now_ns()
    streams = [machine.ask(110, 64) for _ in range(32)]
    machine.drain()
    return Figures.of(machine, streams, streams, start_ns)


def long_prompt(machine: Machine) -> Figures:
    running = [machine.ask(110, 400) for _ in range(8)]
    for _ in range(100):
        machine.step()
    start_ns = machine.clock.now_ns()
    stream = machine.ask(1500, 8)
    while not stream.got_ns:
        machine.step()
    figures = Figures.of(machine, [stream], running, start_ns)
    machine.drain()
    return figures


def closed_loop(machine: Machine, clients: int) -> Figures:
    start_ns = machine.clock.now_ns()
    streams = [machine.ask(110, 64) for _ in range(clients)]
    while len(streams) < 20 * clients:
        streams += [machine.ask(110, 64) for _ in machine.step()]
    asked = [stream for stream in streams[clients:] if stream.got_ns]
    return Figures.of(machine, asked, asked, start_ns)


def run(scenario: str, machine: Machine) -> Figures:
    machine.warm_up()
    if scenario == "burst":
        return burst(machine)
    if scenario == "long":
        return long_prompt(machine)
    return closed_loop(machine, int(scenario.removeprefix("closed ")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--noise", type=float, default=0.1, help="mean of the random part of a step")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fixed-tokens", type=int, default=512, help="the fixed budget of a step")
    add_json_option(parser)
    args = parser.parse_args()
    found: list[dict[str, object]] = []
    print(f"{'':<18}{'':<11}{'TTFT p50 ms':>22}{'gap p50 ms':>22}{'gap p99 ms':>22}{'all done s':>20}")
    print(f"{'law':<18}{'scenario':<11}" + f"{'fixed':>8}{'target':>7}{'ratio':>7}" * 4)
    for law in LAWS:
        for scenario in ("burst", "long", "closed 8", "closed 32"):
            chance = (args.noise, args.seed)
            fixed = run(scenario, Machine(law, FixedBudget(LatencyTargets()), *chance, args.fixed_tokens))
            target = run(scenario, Machine(law, PrefillBudget(LatencyTargets()), *chance, 512))
            line = f"{law.name:<18}{scenario:<11}"
            row: dict[str, object] = {"law": law.name, "scenario": scenario}
            for name, unit in (("ttft", 1), ("itl_p50", 1), ("itl_p99", 1), ("total", 1000)):
                a, b = (getattr(each, f"{name}_ns") / NS_PER_MS / unit for each in (fixed, target))
                line += f"{a:>8.1f}{b:>7.1f}{b / a:>7.2f}"
                row[name] = {
                    "fixed_budget": a,
                    "target": b,
                    "ratio": b / a,
                    "unit": "ms" if unit == 1 else "s",
                }
            found.append(row)
            print(line)
    options = {"noise": args.noise, "seed": args.seed, "fixed_tokens": args.fixed_tokens}
    write_result(args.json, options | {"rows": found})


if __name__ == "__main__":
    main()
