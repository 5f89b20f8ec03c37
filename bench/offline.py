"""How fast is `LLM.generate` beside the server with the same requests, and beside a loop over transformers?

    python bench/offline.py [--model penstock-demo] [--prompts 256] [--rounds 5] [--json FILE]

Greedy, every answer of `--tokens` tokens, prompts without common beginnings and no prefix cache. The server
is asked by our own load client, all requests at once, and its answers must be the library's to the letter.
The loop asks `transformers` for one prompt after the other, with every core, for the first `--loop` prompts.
All three take turns, in another order each round; figures are output tokens per second, and ratios within a
round: their median and range.
"""

import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import REPOSITORY, command_line, write_result

sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests" / "doubles")]

import torch
from served import Server
from transformers import AutoModelForCausalLM

from penstock import LLM, SamplingParams, rng
from penstock.bench.client import ApiAddress, Client
from penstock.config.checkpoints import resolve

WORDS = ("river", "gate", "turbine", "valley", "water", "winter", "stone", "bridge", "engine", "light")
PACKAGES = ("torch", "transformers")


def prompts_of(count: int, num_words: int) -> list[str]:
    draw = rng.stream(0, "prompts")
    return [f"{i} " + " ".join(draw.choice(WORDS) for _ in range(num_words)) for i in range(count)]


class Library:
    """`LLM.generate` of all prompts."""

    def __init__(self, model: str, prompts: list[str], tokens: int) -> None:
        self.prompts, self.tokens = prompts, tokens
        self.llm = LLM(model, enable_prefix_caching=False)
        self.params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

    def run(self) -> list[str]:
        outputs = self.llm.generate(self.prompts, self.params, use_tqdm=False)
        return [output.outputs[0].text for output in outputs]


class Served:
    """The same requests to `penstock serve`."""

    def __init__(self, model: str, prompts: list[str], tokens: int, place: Path) -> None:
        (place / "config.yaml").write_text(
            f"models: [{{path: {model}, name: bench, engine: {{prefix_cache: false}}}}]\n"
            f"server: {{port: 0}}\nledger: {{directory: {place / 'ledger'}}}\nlog: {{level: error}}\n"
            f"limits: {{concurrent_max: {4 * len(prompts)}}}\n"
            "admission: {ttft_target_ms: 0, tpot_target_ms: 0, targets: []}\n"  # A batch is in no hurry.
        )
        self.server = Server(place, "-c", str(place / "config.yaml"))
        self.server.wait_ready()
        self.bodies = [
            json.dumps(
                {
                    "model": "bench",
                    "prompt": prompt,
                    "temperature": 0,
                    "max_tokens": tokens,
                    "ignore_eos": True,
                }
            ).encode()
            for prompt in prompts
        ]

    def run(self) -> list[str]:
        async def ask() -> list[str]:
            client = Client(ApiAddress.parse(self.server.url), key=self.server.key)
            try:
                answers = await asyncio.gather(*(client.post("/completions", body) for body in self.bodies))
            finally:
                await client.close()
            assert all(answer.status == 200 for answer in answers), {answer.status for answer in answers}
            return [json.loads(answer.body)["choices"][0]["text"] for answer in answers]

        return asyncio.run(ask())


class Loop:
    """One prompt after the other."""

    def __init__(self, model: str, llm: LLM, prompts: list[str], tokens: int) -> None:
        loaded = AutoModelForCausalLM.from_pretrained(resolve(model), dtype=torch.bfloat16)
        self.model: Any = loaded.eval()  # Its `generate` has no types of its own.
        encode = llm.get_tokenizer().encode
        self.ids = [torch.tensor([encode(prompt, add_special_tokens=True)]) for prompt in prompts]
        self.tokens = tokens

    def run(self) -> list[str]:
        with torch.inference_mode():
            for ids in self.ids:
                out = self.model.generate(
                    ids, do_sample=False, min_new_tokens=self.tokens, max_new_tokens=self.tokens,
                    attention_mask=torch.ones_like(ids), pad_token_id=0,
                )  # fmt: skip
                assert out.shape[1] == ids.shape[1] + self.tokens
        return []


def rate(run: Callable[[], list[str]], num_tokens: int) -> tuple[float, list[str]]:
    start = time.perf_counter()
    answers = run()
    return num_tokens / (time.perf_counter() - start), answers


def main() -> None:
    parser = command_line(__doc__, rounds=5)
    parser.add_argument("--model", default="penstock-demo")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--words", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--loop", type=int, default=16)
    args = parser.parse_args()
    prompts = prompts_of(args.prompts, args.words)
    with tempfile.TemporaryDirectory() as place:
        library = Library(args.model, prompts, args.tokens)
        served = Served(args.model, prompts, args.tokens, Path(place))
        loop = Loop(args.model, library.llm, prompts[: args.loop], args.tokens)
        arms: dict[str, tuple[Callable[[], list[str]], int]] = {
            "library": (library.run, args.prompts * args.tokens),
            "server": (served.run, args.prompts * args.tokens),
            "transformers": (loop.run, args.loop * args.tokens),
        }
        try:
            rates = measure(arms, args.rounds)
        finally:
            library.llm.close()
            served.server.close()
    ratios = {
        f"library_over_{other}": [
            mine / its for mine, its in zip(rates["library"], rates[other], strict=True)
        ]
        for other in ("server", "transformers")
    }
    for name, found in {**rates, **ratios}.items():
        print(f"{name}: {statistics.median(found):,.2f} ({min(found):,.2f} to {max(found):,.2f})")
    shape = {name: getattr(args, name) for name in ("model", "prompts", "words", "tokens", "loop", "rounds")}
    medians = {name: statistics.median(found) for name, found in {**rates, **ratios}.items()}
    versions = {name: sys.modules[name].__version__ for name in PACKAGES}
    write_result(
        args.json,
        {"shape": shape, "tokens_per_s": rates, "ratios": ratios, "median": medians},
        versions,
    )


def measure(arms: dict[str, tuple[Callable[[], list[str]], int]], rounds: int) -> dict[str, list[float]]:
    """Output tokens per second of each, by round."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for round_ in range(-1, rounds):  # The first one warms up.
        names = [*arms][round_ % 3 :] + [*arms][: round_ % 3]
        answers: dict[str, list[str]] = {}
        for name in names:
            speed, answers[name] = rate(*arms[name])
            if round_ >= 0:
                found[name].append(speed)
        assert answers["library"] == answers["server"], "the same requests have the same answers"
        print({name: round(each[-1]) for name, each in found.items() if each}, file=sys.stderr, flush=True)
    return found


if __name__ == "__main__":
    main()
