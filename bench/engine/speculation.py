"""The worth of speculation: tokens per second of the engine core with `engine.speculation` and without.

    python -m bench.engine.speculation MODEL_DIR [--speculation ngram|DRAFT_DIR|HEAD_DIR] [--batch 1 32]
    [--rounds 5] [--kinds copy asked fresh] [--quantization none] [--worth 1.2] [--calls] [--json FILE]

Both engines hold the same model and answer the same prompts in turns of 50 ms, so that what else the machine
does hits both; their answers must be the same, token by token. After each step its outputs are encoded as a
worker would. The figure is the ratio on / off of each round: its median and its spread; beside it the same
ratio by the processor time of both, which a busy machine disturbs less. With `--speculation off` neither
speculates: the spread that is left is the bench's own. There are three kinds of prompts:

    copy    a conversation in which the last question was asked, and answered, before: the answer is a copy
    asked   a question of those that the model was trained for, answered at temperature 1: nothing to copy
    fresh   a question, answered at temperature 1 up to 96 tokens whether it ends or not: little is repeated

`--calls` counts Python's calls for each step of either engine, over `--rounds` batches, and times nothing:
the price of deciding on drafts, on a busy machine too.

`--worth` is `engine.draft_worth`: with 0 rows have as many guesses as fit, so that a wrong law hides nothing.
Of a draft model the time of its step over the target's is measured too, each in an engine of its own and with
one request. A guess takes less than that: it is one pass, without an engine's scheduling and outputs.
"""

import argparse
import cProfile
import math
import pstats
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.harness import command_line, write_result
from penstock import rng
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.loader import holds_head
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import StepOutput, Submit, encode
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams

CLOCK = SystemClock()
TEMPERATURES = {"copy": 0.0, "asked": 1.0, "fresh": 1.0}
FRESH_TOKENS, COPY_TOKENS_MAX = 96, 200
TURN_NS = 50_000_000
QUESTIONS = (
    "Tell me a story",
    "What is Penstock?",
    "Count from 1 to 40",
    "What can you do?",
    "Write the 7 times table.",
    "Write a haiku",
    "List the months of the year.",
    "How do I serve a model?",
)


def build(path: Path, speculation: str, args: argparse.Namespace) -> EngineCore:
    """An engine with a runner of its own."""
    config = EngineSettings(
        speculation=speculation, quantization=args.quantization, draft_worth=args.worth, prefix_cache=False,
        kv_memory_bytes=256 << 20,
    )  # fmt: skip
    runner = build_runner(path, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    return build_core(runner, config, b"bench" * 8, CLOCK)


def asked(question: str) -> str:
    """A question as the demo models are asked."""
    return f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"


class Prompts:
    """Prompts for one model; conversations are what it says itself."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.stops = tuple(tokenizer.eos_ids)
        alone = [list(tokenizer.encode(asked(question))) for question in QUESTIONS]
        reported = answer(core, alone, Sampling(0.0, COPY_TOKENS_MAX, self.stops), "before").answers
        end = list(tokenizer.encode("<|im_end|>\n"))
        self._exchanges = [
            [*each, *(token for token in said if token not in self.stops), *end]
            for each, said in zip(alone, reported, strict=True)
        ]

    def of(self, kind: str, round_: int, index: int) -> list[int]:
        """One prompt of a kind."""
        random = rng.stream(1000 * round_ + index, f"speculation bench {kind}")
        if kind == "asked":
            number, last = random.randrange(2, 13), random.randrange(20, 41)
            kinds = (
                f"Write the {number} times table.", f"Count from {number} to {last}", "Tell me a story",
                "What can you do?",
            )  # fmt: skip
            return list(self._tokenizer.encode(asked(kinds[index % len(kinds)])))
        if kind == "fresh":
            one, other = random.randrange(10, 99), random.randrange(10, 99)
            return list(self._tokenizer.encode(asked(f"Here is {one}. Say {other} words about the harbour.")))
        order = random.sample(range(len(QUESTIONS)), 4)
        again = asked(QUESTIONS[order[(round_ + index) % 4]])
        before = [token for each in order for token in self._exchanges[each]]
        return [*before, *self._tokenizer.encode(again)]


@dataclass
class Sampling:
    """How the prompts of a batch are answered."""

    temperature: float
    tokens: int
    stops: tuple[int, ...] = ()


@dataclass
class Answered:
    """How a batch was answered."""

    tokens_per_s: float
    tokens_per_cpu_s: float
    answers: list[list[int]]
    drafted: int
    accepted: int


class Answering:
    """A closed batch, every prompt to its last token. Time counts from when all of them are computed."""

    def __init__(self, core: EngineCore, prompts: list[list[int]], how: Sampling, name: str) -> None:
        self._core, self._step, self._ns, self._cpu_s = core, 0, 0, 0.0
        self._before = core.stats()
        self._said: dict[str, list[int]] = {}
        self._in_time: int | None = None
        for index, each in enumerate(prompts):
            request_id = RequestId(f"{name}/{index}")
            self._said[request_id] = []
            sampling = SamplingParams(
                max_tokens=how.tokens, temperature=how.temperature, seed=index, stop_token_ids=how.stops
            )
            message = Submit(request_id=request_id, prompt=token_array(each).tobytes(), sampling=sampling)
            core.submit(0, message, CLOCK.now_ns())

    def run_for(self, for_ns: float) -> bool:
        """Steps for so long; whether any are left."""
        entered_ns = begun_ns = now_ns = CLOCK.now_ns()
        begun_cpu_s = time.process_time()
        while self._core.has_work and now_ns - entered_ns < for_ns:
            for outputs in self._core.step().values():
                self._step += 1
                encode(StepOutput(self._step, tuple(outputs)))
                for output in outputs:
                    self._said[output.request_id].extend(output.token_ids)
            now_ns = CLOCK.now_ns()
            if self._in_time is None and all(self._said.values()):
                self._in_time = sum(map(len, self._said.values()))
                begun_ns, begun_cpu_s = now_ns, time.process_time()
        if self._in_time is not None:
            self._ns += now_ns - begun_ns
            self._cpu_s += time.process_time() - begun_cpu_s
        return self._core.has_work

    def answered(self) -> Answered:
        """After the last step."""
        after, in_time = self._core.stats(), self._in_time
        assert in_time is not None, "every prompt has an answer"
        tokens = sum(map(len, self._said.values())) - in_time
        return Answered(
            tokens * NS_PER_S / self._ns,
            tokens / self._cpu_s,
            list(self._said.values()),
            after.drafted_tokens - self._before.drafted_tokens,
            after.accepted_tokens - self._before.accepted_tokens,
        )


def answer(core: EngineCore, prompts: list[list[int]], how: Sampling, name: str) -> Answered:
    """All prompts at once."""
    batch = Answering(core, prompts, how, name)
    batch.run_for(math.inf)
    return batch.answered()


def answer_in_turns(
    cores: Sequence[EngineCore], prompts: list[list[int]], how: Sampling, name: str
) -> list[Answered]:
    """By several engines, for `TURN_NS` each in turns: what else the machine does hits all alike."""
    batches = [Answering(core, prompts, how, name) for core in cores]
    left = batches
    while left:
        left = [batch for batch in left if batch.run_for(TURN_NS)]
    return [batch.answered() for batch in batches]


@dataclass
class Compared:
    """Rounds of one kind of prompt at one batch size."""

    off: list[float]
    on: list[float]
    cpu_ratios: list[float]
    answered: int = 0
    drafted: int = 0
    accepted: int = 0

    @property
    def ratios(self) -> list[float]:
        """On over off, round by round."""
        return [on / off for on, off in zip(self.on, self.off, strict=True)]


def compare(
    off: EngineCore, on: EngineCore, prompts: Prompts, kind: str, batch: int, rounds: int
) -> Compared:
    """Both engines in turns."""
    found = Compared([], [], [])
    tokens, stops = (FRESH_TOKENS, ()) if kind == "fresh" else (COPY_TOKENS_MAX, prompts.stops)
    how = Sampling(TEMPERATURES[kind], tokens, stops)
    for round_ in range(rounds + 1):  # The first one warms up.
        # A lone answer to a copied question is short: several make a round.
        batches = [
            [prompts.of(kind, round_, len(QUESTIONS) * part + index) for index in range(batch)]
            for part in range(8 if batch == 1 else 1)
        ]
        rates: dict[bool, list[float]] = {True: [], False: []}
        cpu_rates: dict[bool, list[float]] = {True: [], False: []}
        for part, each in enumerate(batches):
            order = ((True, False), (False, True))[(round_ + part) % 2]
            cores = [on if speculates else off for speculates in order]
            both = answer_in_turns(cores, each, how, f"{kind}/{batch}/{round_}/{part}")
            reported = dict(zip(order, both, strict=True))
            for speculates, report in reported.items():
                rates[speculates].append(1 / report.tokens_per_s)
                cpu_rates[speculates].append(1 / report.tokens_per_cpu_s)
            assert reported[True].answers == reported[False].answers, "the answers are not the same"
            if round_:
                found.answered += sum(map(len, reported[True].answers))
                found.drafted += reported[True].drafted
                found.accepted += reported[True].accepted
        if round_:
            found.on.append(1 / statistics.mean(rates[True]))
            found.off.append(1 / statistics.mean(rates[False]))
            found.cpu_ratios.append(statistics.mean(cpu_rates[False]) / statistics.mean(cpu_rates[True]))
    return found


def calls_per_step(
    core: EngineCore, prompts: Prompts, kind: str, batch: int, rounds: int
) -> dict[str, float]:
    """Python's calls for each step of an engine, and how many tokens it drafted."""
    tokens, stops = (FRESH_TOKENS, ()) if kind == "fresh" else (COPY_TOKENS_MAX, prompts.stops)
    how, profile = Sampling(TEMPERATURES[kind], tokens, stops), cProfile.Profile()
    steps = drafted = 0
    for round_ in range(2 * rounds):  # The first half warms up: laws are learnt from steps.
        before = core.num_steps
        if round_ >= rounds:
            profile.enable()
        each = [prompts.of(kind, round_, index) for index in range(batch)]
        found = answer(core, each, how, f"calls/{kind}/{batch}/{round_}")
        profile.disable()
        if round_ >= rounds:
            steps, drafted = steps + core.num_steps - before, drafted + found.drafted
    calls = pstats.Stats(profile).total_calls  # pyright: ignore[reportAttributeAccessIssue]
    return {"calls_per_step": round(calls / steps, 1), "steps": steps, "drafted": drafted}


def count_calls(off: EngineCore, on: EngineCore, prompts: Prompts, args: argparse.Namespace) -> None:
    """Both engines, kind by kind."""
    rows: list[dict[str, object]] = []
    for batch in args.batch:
        for kind in args.kinds:
            both = [calls_per_step(core, prompts, kind, batch, args.rounds) for core in (off, on)]
            rows.append({"batch": batch, "prompts": kind, "off": both[0], "on": both[1]})
            print(rows[-1], flush=True)
    settings = {"model": args.model.name, "speculation": Path(args.speculation).name}
    write_result(args.json, {**settings, "rows": rows})


def step_share(off: EngineCore, draft: EngineCore, prompts: Prompts, rounds: int) -> float:
    """A step of the draft model over one of the target, each with one request: the median of rounds."""
    shares: list[float] = []
    for round_ in range(rounds + 1):
        rates = [
            answer(core, [prompts.of("fresh", round_, 0)], Sampling(1.0, FRESH_TOKENS), f"share/{round_}")
            for core in (off, draft)
        ]
        shares.append(rates[0].tokens_per_s / rates[1].tokens_per_s)
    return statistics.median(shares[1:])


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("model", type=Path)
    parser.add_argument("--speculation", default="ngram")
    parser.add_argument("--quantization", default="none")
    parser.add_argument("--worth", type=float, default=EngineSettings().draft_worth)
    parser.add_argument("--calls", action="store_true")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", choices=TEMPERATURES, default=list(TEMPERATURES))
    args = parser.parse_args()
    off, on = (build(args.model, name, args) for name in ("off", args.speculation))
    prompts = Prompts(off, Tokenizer.load(args.model))
    if args.calls:
        count_calls(off, on, prompts, args)
        return
    share: float | None = None
    if args.speculation not in ("off", "ngram") and not holds_head(Path(args.speculation)):
        draft = build(Path(args.speculation), "off", args)
        share = step_share(off, draft, prompts, args.rounds)
        print(f"a step of the draft model takes {share:.3f} of one of the target")
    print("batch prompts   off tok/s   on tok/s  on / off    min    max")
    rows: list[dict[str, object]] = []
    for batch in args.batch:
        for kind in args.kinds:
            found = compare(off, on, prompts, kind, batch, args.rounds)
            ratios, median = found.ratios, statistics.median(found.ratios)
            print(
                f"{batch:>5} {kind:>7} {statistics.median(found.off):>11.1f} "
                f"{statistics.median(found.on):>10.1f} {median:>9.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}"
                f"   cpu {statistics.median(found.cpu_ratios):.3f}"
                f"   {found.accepted} of {found.drafted} drafts right, {found.answered} tokens",
                flush=True,
            )
            row = {"batch": batch, "prompts": kind, "ratios": ratios, "median": median}
            rows.append(row | asdict(found))
    settings: dict[str, object] = {
        "speculation": Path(args.speculation).name, "quantization": args.quantization, "worth": args.worth,
        "step_share": share,
    }  # fmt: skip
    write_result(args.json, {"model": args.model.name, **settings, "rows": rows})


if __name__ == "__main__":
    main()
