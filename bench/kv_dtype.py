"""The cost of a KV cache in int8 in quality, by how far into the context a token is.

    python bench/kv_dtype.py [MODEL_DIR ...] [--sequences 8] [--tokens 64] [--json FILE]

Teacher-forced: every sequence goes through three decoders in chunks of 512: float32, bfloat16 and bfloat16
with the KV cache in int8. By span of positions: each one's perplexity, the mean KL divergence in nats to
float32 and of int8 to bfloat16, and how often the likeliest token is the same. Free-running: the engine
answers prompts of many lengths greedily with both caches; counted are equal answers and equal tokens before
the first other one. Sequences are as long as the model's context: conversations of the kind that the demo
models were trained on, from another seed, and Python's own documentation.
"""

import math
import pydoc_data.topics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import cast

import numpy as np
import torch
from harness import REPOSITORY, command_line, write_result
from torch import Tensor

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.core import build_core
from penstock.engine.decoder import DecoderLimits
from penstock.engine.kv_cache import KVCache
from penstock.engine.loader import load_weights
from penstock.engine.runner import build_runner
from penstock.engine.step_model import StepModel, choose_computing, wire_model
from penstock.kv.hashing import token_array
from penstock.models.registry import read_spec
from penstock.protocol.worker import Submit
from penstock.text.tokenizer import Tokenizer
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

sys.path.insert(0, str(REPOSITORY))

from training.conversations import conversations
from training.settings import RECIPES

CLOCK = SystemClock()
CHUNK = 512
SPANS = (0, 512, 1024, 2048, 3072, 4096)
SEED = 505
KINDS: dict[str, dict[str, str]] = {
    "float32": {"dtype": "float32"},
    "bf16": {"dtype": "bfloat16"},
    "bf16, int8 KV": {"dtype": "bfloat16", "kv_dtype": "int8"},
}
PROMPTS = (256, 1000, 2000, 3000, 4000)
PROMPTS_EACH = 8


@dataclass
class Sums:
    """Over the tokens of one span."""

    tokens: int = 0
    nll: dict[str, float] = field(default_factory=dict[str, float])
    kl: dict[str, float] = field(default_factory=dict[str, float])
    same: dict[str, int] = field(default_factory=dict[str, int])

    def add(self, logprobs: dict[str, Tensor], targets: Tensor) -> None:
        """`logprobs` [n, vocab] of each kind, `targets` [n]."""
        self.tokens += len(targets)
        for name, found in logprobs.items():
            nll = -found.gather(1, targets[:, None]).sum()
            self.nll[name] = self.nll.get(name, 0.0) + float(nll)
        names = tuple(logprobs)
        for right, other in ((names[0], names[1]), (names[0], names[2]), (names[1], names[2])):
            p, q, key = logprobs[right], logprobs[other], f"{right} to {other}"
            self.kl[key] = self.kl.get(key, 0.0) + float((p.exp() * (p - q)).sum())
            self.same[key] = self.same.get(key, 0) + int((p.argmax(1) == q.argmax(1)).sum())

    def result(self) -> dict[str, object]:
        """Means."""
        return {
            "tokens": self.tokens,
            "perplexity": {name: math.exp(total / self.tokens) for name, total in self.nll.items()},
            "kl_nats": {name: total / self.tokens for name, total in self.kl.items()},
            "same_likeliest_token": {name: count / self.tokens for name, count in self.same.items()},
        }


def texts(directory: Path, length: int, count: int) -> dict[str, list[list[int]]]:
    """Sequences of token ids by the kind of text."""
    tokenizer = Tokenizer.load(directory)
    persona = next(iter(RECIPES.values())).persona

    def talk() -> Iterator[int]:
        for each in conversations(SEED, persona):
            yield from tokenizer.encode("".join(piece.text for piece in each.pieces()))

    def documentation() -> Iterator[int]:
        topics = cast(dict[str, str], pydoc_data.topics.topics)
        yield from tokenizer.encode("\n\n".join(topics[name] for name in sorted(topics)))

    found: dict[str, list[list[int]]] = {}
    for name, stream in (("conversations", talk()), ("documentation", documentation())):
        ids = list(islice(stream, length * count))
        found[name] = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    return found


class Forced:
    """A decoder of one kind that gives the logits of every token."""

    def __init__(self, directory: Path, settings: dict[str, str], length: int) -> None:
        spec, names = read_spec(directory)
        config = EngineSettings(device="cpu", **settings)
        computing = choose_computing(config, spec)
        weights = load_weights(directory, spec, names, computing.dtype, lambda _done, _total: None)
        limits = DecoderLimits(step_tokens=CHUNK, max_samples=CHUNK, max_model_len=length)
        blocks = -(-length // BLOCK_TOKENS)
        rounded = config.kv_dtype == "int8"
        self._cache = KVCache(spec, blocks, computing.dtype, torch.device("cpu"), rounded=rounded)
        self._model: StepModel = wire_model(spec, weights, limits, self._cache, computing)
        self._table = np.arange(blocks, dtype=np.int32)[None]

    def logprobs(self, ids: Sequence[int], first: int) -> Tensor:
        """[count, vocab] after each of `ids`, which stand at `first` and follow what was asked before."""
        count = len(ids)
        batch = AttentionBatch(
            num_computed=np.array([first], np.int32),
            num_tokens=np.array([count], np.int32),
            positions=torch.arange(first, first + count),
            block_tables=self._table,
        )
        return self._model.compute(torch.tensor(ids), torch.arange(count), batch).log_softmax(-1)


@torch.inference_mode()
def forced(directory: Path, sequences: Sequence[Sequence[int]]) -> list[dict[str, object]]:
    """By span of positions."""
    length = len(sequences[0])
    decoders = {name: Forced(directory, settings, length) for name, settings in KINDS.items()}
    spans = [(low, min(high, length)) for low, high in pairwise(SPANS) if low < length]
    sums = {span: Sums() for span in spans}
    for ids in sequences:
        for first in range(0, length - 1, CHUNK):
            piece = ids[first : first + CHUNK]
            targets = torch.tensor(ids[first + 1 : first + 1 + len(piece)])
            found = {name: each.logprobs(piece, first)[: len(targets)] for name, each in decoders.items()}
            span = next(span for span in spans if span[0] <= first < span[1])
            sums[span].add(found, targets)
    return [{"from": low, "to": high, **each.result()} for (low, high), each in sums.items()]


def answers(directory: Path, kv_dtype: str, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
    """Greedy answers of the engine."""
    config = EngineSettings(device="cpu", kv_dtype=kv_dtype, max_running=8, kv_memory_bytes=512 << 20)
    runner = build_runner(directory, config, CLOCK, lambda _stage, _done, _total: None)
    core = build_core(runner, config, b"kv dtype" * 4, CLOCK)
    said: dict[RequestId, list[int]] = {}
    for number, prompt in enumerate(prompts):
        request_id = RequestId(f"k{number}")
        said[request_id] = []
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
        ids = token_array(prompt).tobytes()
        core.submit(0, Submit(request_id=request_id, prompt=ids, sampling=sampling), CLOCK.now_ns())
    while core.has_work:
        for output in core.step().get(0, []):
            said[output.request_id] += output.token_ids
    return list(said.values())


def free_running(directory: Path, sequences: Sequence[Sequence[int]], tokens: int) -> list[dict[str, object]]:
    """By length of the prompt."""
    found: list[dict[str, object]] = []
    for length in PROMPTS:
        if length + tokens > len(sequences[0]):
            continue
        prompts = [sequences[number % len(sequences)][:length] for number in range(len(sequences))]
        plain, rounded = (answers(directory, kind, prompts, tokens) for kind in ("auto", "int8"))
        before = [
            next((at for at, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), tokens)
            for x, y in zip(plain, rounded, strict=True)
        ]
        found.append(
            {
                "prompt_tokens": length,
                "answers": len(prompts),
                "equal_answers": sum(each == tokens for each in before),
                "mean_equal_tokens": sum(before) / len(before),
                "of_tokens": tokens,
            }
        )
    return found


def main() -> None:
    parser = command_line(__doc__)
    models = [recipe.folder for recipe in RECIPES.values()]
    parser.add_argument("models", type=Path, nargs="*", default=models, metavar="MODEL_DIR")
    parser.add_argument("--sequences", type=int, default=8, help="of each kind of text")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer")
    args = parser.parse_args()
    result: dict[str, object] = {}
    for directory in args.models:
        spec, _ = read_spec(directory)
        length = min(spec.max_position, SPANS[-1])
        by_text: dict[str, object] = {}
        for kind, sequences in texts(directory, length, args.sequences).items():
            by_span = forced(directory, sequences)
            free = free_running(directory, sequences, args.tokens)
            by_text[kind] = {"forced": by_span, "free_running": free}
            for each in (*by_span, *free):
                print(directory.name, kind, each, flush=True)
        result[directory.name] = by_text
    write_result(args.json, {"models": result})


if __name__ == "__main__":
    main()
