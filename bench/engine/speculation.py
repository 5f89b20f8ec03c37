"""The worth of speculation: tokens per second of the engine core with `engine.speculation` and without.

    python -m bench.engine.speculation MODEL_DIR [--speculation ngram|DRAFT_DIR|HEAD_DIR] [--batch 1 8 32]
        [--kinds copy asked fresh] [--rounds 5] [--json FILE]

Both engines hold the same model and answer the same prompts in turns of 50 ms, so that what else the machine
does hits both; their answers must be the same, token by token. The figure is the ratio on / off of each
round, beside it the same by the processor time of both. With `--speculation off` neither speculates: the
spread that is left is the bench's own.

    copy    a conversation in which the last question was asked, and answered, before: the answer is a copy
    asked   a question of those that the model was trained for, answered at temperature 1: nothing to copy
    fresh   a question, answered at temperature 1 up to 96 tokens whether it ends or not: little is repeated
"""

import statistics
import time
from dataclasses import dataclass
from pathlib import Path

from bench.harness import command_line, ratio, spread, table, write_result
from penstock import rng
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, build_core
from penstock.engine.runner import build_runner
from penstock.kv.hashing import token_array
from penstock.protocol.worker import StepOutput, Submit, encode
from penstock.text.tokenizer import Tokenizer
from penstock.types import RequestId, SamplingParams

CLOCK = SystemClock()
TEMPERATURES = {"copy": 0.0, "asked": 1.0, "fresh": 1.0}
FRESH_TOKENS, COPY_TOKENS_MAX, TURN_NS = 96, 200, 50_000_000
LONE_PARTS = 8
"""A lone answer to a copied question is short: several make a round."""
QUESTIONS = (
    "Tell me a story", "What is Penstock?", "Count from 1 to 40", "What can you do?",
    "Write the 7 times table.", "Write a haiku", "List the months of the year.", "How do I serve a model?",
)  # fmt: skip


def build(path: Path, speculation: str) -> EngineCore:
    """An engine with a runner of its own."""
    config = EngineSettings(speculation=speculation, prefix_cache=False, kv_memory_bytes=256 << 20)
    runner = build_runner(path, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    return build_core(runner, config, b"bench" * 8, CLOCK)


@dataclass
class Sampling:
    """How the prompts of a batch are answered."""

    temperature: float
    tokens: int
    stops: tuple[int, ...] = ()


class Prompts:
    """Prompts for one model; conversations are what it says itself."""

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._stops = tokenizer, tuple(tokenizer.eos_ids)
        alone = [self._asked(question) for question in QUESTIONS]
        before = Answering(core, alone, self.how("copy"), "before")
        before.run_for(1 << 62)
        end = list(tokenizer.encode("<|im_end|>\n"))
        self._exchanges = [
            [*each, *(token for token in said if token not in self._stops), *end]
            for each, said in zip(alone, before.said.values(), strict=True)
        ]

    def how(self, kind: str) -> Sampling:
        """The way in which a kind is answered."""
        if kind == "fresh":
            return Sampling(TEMPERATURES[kind], FRESH_TOKENS)
        return Sampling(TEMPERATURES[kind], COPY_TOKENS_MAX, self._stops)

    def of(self, kind: str, round_: int, index: int) -> list[int]:
        """One prompt of a kind."""
        random = rng.stream(1000 * round_ + index, f"speculation bench {kind}")
        if kind == "asked":
            times, last = f"Write the {random.randrange(2, 13)} times table.", random.randrange(20, 41)
            kinds = (times, f"Count from {last // 10} to {last}", "Tell me a story", "What can you do?")
            return self._asked(kinds[index % len(kinds)])
        if kind == "fresh":
            one, other = random.randrange(10, 99), random.randrange(10, 99)
            return self._asked(f"Here is {one}. Say {other} words about the harbour.")
        order = random.sample(range(len(QUESTIONS)), 4)
        before = [token for each in order for token in self._exchanges[each]]
        return [*before, *self._asked(QUESTIONS[order[(round_ + index) % 4]])]

    def _asked(self, question: str) -> list[int]:
        text = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        return list(self._tokenizer.encode(text))


class Answering:
    """A closed batch, every prompt to its last token. Time counts from when all of them are computed."""

    def __init__(self, core: EngineCore, prompts: list[list[int]], how: Sampling, name: str) -> None:
        self._core, self._step, self._before = core, 0, core.stats()
        self.ns, self.cpu_s = 0, 0.0
        self.said: dict[str, list[int]] = {}
        self._in_time: int | None = None
        for index, each in enumerate(prompts):
            request_id = RequestId(f"{name}/{index}")
            self.said[request_id] = []
            sampling = SamplingParams(
                max_tokens=how.tokens, temperature=how.temperature, seed=index, stop_token_ids=how.stops
            )
            message = Submit(request_id=request_id, prompt=token_array(each).tobytes(), sampling=sampling)
            core.submit(0, message, CLOCK.now_ns())

    def run_for(self, for_ns: int) -> bool:
        """Steps for so long, their outputs encoded as a worker would; whether any are left."""
        entered_ns = begun_ns = now_ns = CLOCK.now_ns()
        begun_cpu_s = time.process_time()
        while self._core.has_work and now_ns - entered_ns < for_ns:
            for outputs in self._core.step().values():
                self._step += 1
                encode(StepOutput(self._step, tuple(outputs)))
                for output in outputs:
                    self.said[output.request_id].extend(output.token_ids)
            now_ns = CLOCK.now_ns()
            if self._in_time is None and all(self.said.values()):
                self._in_time = sum(map(len, self.said.values()))
                begun_ns, begun_cpu_s = now_ns, time.process_time()
        if self._in_time is not None:
            self.ns += now_ns - begun_ns
            self.cpu_s += time.process_time() - begun_cpu_s
        return self._core.has_work

    @property
    def tokens(self) -> int:
        """Those that the time was counted of; after the last step."""
        assert self._in_time is not None, "every prompt has an answer"
        return sum(map(len, self.said.values())) - self._in_time

    @property
    def drafts(self) -> tuple[int, int]:
        """How many tokens were drafted, and right."""
        now, before = self._core.stats(), self._before
        return now.drafted_tokens - before.drafted_tokens, now.accepted_tokens - before.accepted_tokens


Figures = dict[str, list[float]]
"""Tokens per second, and per second of the processor, with and without; one a round."""


def compare(cores: dict[str, EngineCore], prompts: Prompts, kind: str, batch: int, rounds: int) -> Figures:
    """Both engines in turns."""
    found: Figures = {name: [] for name in ("on", "off", "on_cpu", "off_cpu", "drafted", "accepted")}
    for round_ in range(rounds + 1):  # The first one warms up.
        parts: dict[str, list[Answering]] = {"on": [], "off": []}
        for part in range(LONE_PARTS if batch == 1 else 1):
            asked = [prompts.of(kind, round_, len(QUESTIONS) * part + index) for index in range(batch)]
            order = ("on", "off") if (round_ + part) % 2 else ("off", "on")
            name = f"{kind}/{batch}/{round_}/{part}"
            both = {side: Answering(cores[side], asked, prompts.how(kind), name) for side in order}
            left = list(both.values())
            while left:
                left = [each for each in left if each.run_for(TURN_NS)]
            said = [list(each.said.values()) for each in both.values()]
            assert said[0] == said[1], "the answers are not the same"
            for side, each in both.items():
                parts[side].append(each)
        if round_:
            for side, each in parts.items():
                found[side].append(1 / statistics.mean(one.ns / NS_PER_S / one.tokens for one in each))
                found[f"{side}_cpu"].append(1 / statistics.mean(one.cpu_s / one.tokens for one in each))
            drafted, accepted = zip(*(one.drafts for one in parts["on"]), strict=True)
            found["drafted"].append(sum(drafted))
            found["accepted"].append(sum(accepted))
    return found


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("model", type=Path)
    parser.add_argument("--speculation", default="ngram")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--kinds", nargs="+", choices=TEMPERATURES, default=list(TEMPERATURES))
    args = parser.parse_args()
    cores = {"off": build(args.model, "off"), "on": build(args.model, args.speculation)}
    prompts = Prompts(cores["off"], Tokenizer.load(args.model))
    found: dict[str, Figures] = {}
    rows: list[tuple[object, ...]] = []
    for batch in args.batch:
        for kind in args.kinds:
            found[f"{kind}, {batch}"] = each = compare(cores, prompts, kind, batch, args.rounds)
            right = f"{sum(each['accepted']):.0f} of {sum(each['drafted']):.0f}"
            cpu = ratio(each["on_cpu"], each["off_cpu"])
            rows.append((kind, batch, spread(each["off"]), ratio(each["on"], each["off"]), cpu, right))
            print(*rows[-1], flush=True)
    print(table(("prompts", "at once", "off, tok/s", "on / off", "by CPU", "drafts right"), rows))
    settings = {"model": args.model.name, "speculation": Path(args.speculation).name}
    write_result(args.json, {**settings, "rows": found})


if __name__ == "__main__":
    main()
