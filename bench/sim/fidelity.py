"""Is the simulator true? A real gateway and worker beside simulated ones, and which figures are far off.

    python -m bench.sim.fidelity [--seconds 50] [--seed 1] [--json FILE]

Twice: three requests a second to a gateway that promises nothing, where everybody is answered, and nine with
the default promises, where a third is refused. Both sides have one configuration. The real worker computes
nothing: its runner takes the time that the roofline says (tests/doubles/modelled_runner.py); all else is the
product's own. The host's time between two steps is not in the roofline: the TPOT of the first case says it,
and the last columns are the simulator with so much in each step. Those are to be near: times and tokens per
second within 10 %; counters equal where nothing is promised (cached tokens within 2 %: which of two requests
at one instant goes first is not modelled), else within 10 %.
"""

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import uvloop
from modelled_load import ANSWER_TOKEN, load
from modelled_runner import RUNNER, Modelled, OnDevice, modelled_worker

from bench.harness import command_line, table, write_result
from bench.process import Served
from penstock.clock import NS_PER_S
from penstock.config.engine_settings import EngineSettings, promised
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import Config
from penstock.planning.roofline import Placed, Roofline, accelerator, model_shape
from penstock.policy.flow import Outcome
from penstock.protocol.address import WorkerLaunch, hash_key_of
from penstock.schedule.step import StepShape
from penstock.sim.report.figures import Spread
from penstock.sim.scenarios.scenario import pool
from penstock.sim.scenarios.setup import Knobs, Setup, play
from penstock.sim.traffic.prompts import RequestRecord
from penstock.sim.traffic.workload import Callers, Conversations, LengthDistribution, Poisson, even, merged
from penstock.sim.world.run import WorldSpec

MODEL, DEVICE, ROWS, STEP_TOKENS, MODEL_LEN = "7b", "a10g", 32, 512, 16_384
PLACED = Placed(model=model_shape(MODEL), device=accelerator(DEVICE))
KEY = "sk-the-key-of-the-fidelity-bench"
NOTHING = AdmissionConfig(ttft_target_ms=0, tpot_target_ms=0, targets=())
CASES = {"nothing promised, 3/s": (3.0, NOTHING), "default promises, 9/s": (9.0, AdmissionConfig())}


class Case(NamedTuple):
    """Traffic and promises."""

    rate: float
    admission: AdmissionConfig
    seconds: float
    seed: int

    @property
    def source(self) -> Conversations:
        """Of one tenant."""
        return Conversations(
            arrivals=Poisson(self.rate / 3), callers=Callers(model="m", tenants=even(1)), system_tokens=160,
            turns=3.0, think_s=5.0, message=LengthDistribution(200, 0.7, maximum=2048),
            output=LengthDistribution(50, 0.6, maximum=256), context_max=6000,
        )  # fmt: skip


class Hosted(NamedTuple):
    """The roofline, and the host's time of each step."""

    host_ns: int
    law: Roofline = Roofline(PLACED)

    def step_ns(self, shape: StepShape) -> int:
        """See `StepTime`."""
        return self.law.step_ns(shape) + self.host_ns

    def decode_ns(self, rows: int, kv_tokens: Sequence[int]) -> list[int]:
        """See `StepTime`."""
        return [took_ns + self.host_ns for took_ns in self.law.decode_ns(rows, kv_tokens)]


def figures(records: Sequence[RequestRecord]) -> dict[str, float]:
    """Of either side."""
    answered = [each for each in records if each.outcome is Outcome.FINISHED]
    output = sum(each.completion_tokens for each in answered)
    ttft = Spread.of([each.ttft_ns for each in answered])
    seconds = (max(each.end_ns for each in records) - min(each.at_ns for each in records)) / NS_PER_S
    return {
        "requests": len(records), "answered": len(answered),
        "prompt_tokens": sum(each.prompt_tokens for each in answered),
        "cached_tokens": sum(each.cached_tokens for each in answered), "output_tokens": output,
        "ttft_p50_ms": ttft.p50, "ttft_p95_ms": ttft.p95,
        "tpot_p50_ms": Spread.of([each.tpot_ns for each in answered if each.completion_tokens > 1]).p50,
        "tokens_per_s": output / seconds,
    }  # fmt: skip


def simulated(case: Case, host_us: int) -> dict[str, float]:
    """On virtual time."""
    knobs = Knobs(max_running=ROWS, step_tokens=STEP_TOKENS, step_time=Hosted(host_us * 1000))
    main = pool(knobs, workers=1, shape=MODEL, device=DEVICE)
    main = replace(main, model="m", worker=replace(main.worker, max_model_len=MODEL_LEN))
    world = WorldSpec(config=Config(admission=case.admission), pools=(main,))
    return figures(play(Setup(world=world, sources=(case.source,), seconds=case.seconds), case.seed).records)


def real(case: Case) -> dict[str, float]:
    """Of a worker process with the modelled runner, and a gateway process in front."""
    modelled = Modelled(
        speed=OnDevice(model=MODEL, device=DEVICE), max_model_len=MODEL_LEN, first_token=ANSWER_TOKEN,
        num_blocks=PLACED.num_blocks,
    )  # fmt: skip
    engine = EngineSettings(max_running=ROWS, step_tokens=STEP_TOKENS, scheduling="fair", overlap="off")
    with tempfile.TemporaryDirectory(prefix="fidelity-") as name:
        launch = WorkerLaunch(
            model_path="modelled", model_name="m", address=f"unix:{name}/worker.sock", runner=RUNNER,
            key=KEY.encode(), hash_key=hash_key_of(KEY.encode()), engine=promised(engine, case.admission),
        )  # fmt: skip
        worker = {"url": launch.address, "engine": "penstock", "api_key_env": "PENSTOCK_API_KEY"}
        model = {"path": "penstock-demo-mini", "name": "m", "replicas": 0, "workers": [worker]}
        admission = msgspec.to_builtins(case.admission)
        config = {"models": [model], "admission": admission, "log": {"access": False}}
        with (
            modelled_worker(Path(name), launch, modelled.environment()),
            Served(Path(name) / "gateway", config, PENSTOCK_API_KEY=KEY) as served,
        ):
            requests = list(merged([case.source], case.seed, case.seconds))
            keys = dict.fromkeys((each.tenant for each in requests), KEY)
            return figures(uvloop.run(load(served.url, keys, requests)))


def is_near(name: str, ratio: float, *, is_exact: bool) -> bool:
    """Whether the simulated figure over the real one is near enough to 1."""
    times = not is_exact or name.endswith(("_ms", "_per_s"))
    return abs(ratio - 1) <= (0.1 if times else 0.02 if name == "cached_tokens" else 0.0)


def compared(case: Case, host_us: int | None) -> dict[str, Any]:
    """Both sides, their ratios, and the figures that are too far off; without `host_us` it is found."""
    was, plain = real(case), simulated(case, 0)
    if host_us is None:
        host_us = max(0, round((was["tpot_p50_ms"] - plain["tpot_p50_ms"]) * 1000))
    hosted, is_exact = simulated(case, host_us), case.admission is NOTHING
    off = [n for n, value in was.items() if not is_near(n, hosted[n] / value, is_exact=is_exact)]
    rows = [
        (n, f"{v:.1f}", f"{plain[n]:.1f}", f"{plain[n] / v:.3f}", f"{hosted[n]:.1f}", f"{hosted[n] / v:.3f}")
        for n, v in was.items()
    ]
    print(table(("", "real", "simulated", "ratio", f"with {host_us} us of host", "ratio"), rows))
    print(f"too far off: {', '.join(off) or 'none'}\n")
    return {"real": was, "simulated": plain, "host_us": host_us, "with_host": hosted, "off": off}


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--seconds", type=float, default=50, help="of arrivals, twice")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    host_us: int | None = None
    for name, (rate, admission) in CASES.items():
        print(f"{name}:")
        found[name] = compared(Case(rate, admission, args.seconds, args.seed), host_us)
        host_us = found[name]["host_us"]
    write_result(args.json, found)
    return int(any(each["off"] for each in found.values()))


if __name__ == "__main__":
    sys.exit(main())
