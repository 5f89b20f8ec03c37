"""What a model's identity costs: milliseconds when a worker starts, and microseconds of each request.

    python bench/identity_cost.py                       print the tables
    python bench/identity_cost.py --json FILE           and keep them
    python bench/identity_cost.py --router-before FILE --router-after FILE
        with what bench/router_decision.py --json wrote of two commits

At the start: the demo models, and checkpoints of any size as sparse files, which take no room on the disk:
their headers are real, their tensors are holes. "cold" asks the system to forget the files' pages before each
round; of holes nothing is ever read from storage, so for those it says little. Per request: the keys of a
prompt of 512 blocks, for workers of one identity and of two.
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from statistics import median

from provenance import write_result

from penstock.clock import NS_PER_MS, SystemClock
from penstock.engine.fingerprint import fingerprint
from penstock.kv.hashing import BlockHasher, PromptKeyMaker

ROOT = Path(__file__).resolve().parents[1]
CLOCK = SystemClock()
KEY = b"bench/identity_cost"
BLOCKS = 512
TOKENIZER_BYTES = 17_000_000
"""As large as that of Llama 3."""


def dense_70b() -> Iterator[tuple[str, int]]:
    """Names and bytes of a 70B model's tensors in bfloat16: 723, 141 GB."""
    width, inner, vocabulary = 8192, 28_672, 128_256
    yield "model.embed_tokens.weight", 2 * width * vocabulary
    for layer in range(80):
        parts = {"q_proj": width, "k_proj": 1024, "v_proj": 1024, "o_proj": width}
        for name, rows in parts.items():
            yield f"model.layers.{layer}.self_attn.{name}.weight", 2 * width * rows
        for name in ("gate_proj", "up_proj", "down_proj"):
            yield f"model.layers.{layer}.mlp.{name}.weight", 2 * width * inner
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"model.layers.{layer}.{name}.weight", 2 * width
    yield "model.norm.weight", 2 * width
    yield "lm_head.weight", 2 * width * vocabulary


def sparse_experts() -> Iterator[tuple[str, int]]:
    """Of a mixture of 256 experts in 58 layers: 45,000 tensors, 1.3 TB."""
    width, inner = 7168, 2048
    for layer in range(58):
        for expert in range(256):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", 2 * width * inner
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{name}.weight", 2 * width * 1536


def write_sparse(directory: Path, tensors: Iterator[tuple[str, int]], num_shards: int) -> dict[str, object]:
    """A checkpoint whose tensors are holes. Returns its sizes."""
    every = list(tensors)
    per_shard = -(-len(every) // num_shards)
    places: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard:05d}-of-{num_shards:05d}.safetensors"
        header: dict[str, object] = {}
        end = 0
        for name, size in every[shard * per_shard : (shard + 1) * per_shard]:
            header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
            places[name] = file
            end += size
        encoded = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            out.truncate(8 + len(encoded) + end)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_bytes(os.urandom(TOKENIZER_BYTES))
    return {
        "tensors": len(every),
        "files": num_shards,
        "gigabytes": round(sum(size for _, size in every) / 1e9, 1),
    }


def times(run: Callable[[], object], rounds: int, before: Callable[[], None] = lambda: None) -> list[int]:
    """Nanoseconds of each round."""
    found: list[int] = []
    for _ in range(rounds):
        before()
        began_ns = CLOCK.now_ns()
        run()
        found.append(CLOCK.now_ns() - began_ns)
    return found


def forget_pages(directory: Path) -> None:
    """Ask the system to read the files anew."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def at_start(directory: Path, rounds: int) -> dict[str, object]:
    """Milliseconds, median and most."""
    warm = times(lambda: fingerprint(directory), rounds)
    cold = times(lambda: fingerprint(directory), rounds, lambda: forget_pages(directory))
    return {
        name: {"median_ms": round(median(each) / NS_PER_MS, 2), "most_ms": round(max(each) / NS_PER_MS, 2)}
        for name, each in (("warm", warm), ("cold", cold))
    }


def per_request(rounds: int) -> dict[str, float]:
    """Microseconds for the keys of one prompt of 512 blocks, least of the rounds."""
    maker, tokens = PromptKeyMaker(key=KEY, model="m"), tuple(range(16 * BLOCKS))
    hashers = [BlockHasher(key=KEY, identity=identity) for identity in ("one", "two")]

    def make(count: int) -> None:
        keys = maker.keys(tokens, salt=b"tenant")
        for hasher in hashers[:count]:
            keys.own(hasher)

    return {
        words: round(min(times(partial(make, count), rounds)) / 1000, 1)
        for count, words in ((1, "one identity"), (2, "two identities"))
    }


def main() -> None:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", default="", metavar="FILE")
    parser.add_argument("--router-before", default="", metavar="FILE")
    parser.add_argument("--router-after", default="", metavar="FILE")
    args = parser.parse_args()
    started: dict[str, dict[str, object]] = {}
    for name in ("penstock-demo-mini", "penstock-demo"):
        started[name] = at_start(ROOT / "models" / name, args.rounds)
    for name, tensors, shards in (
        ("70B dense, sparse files", dense_70b(), 30),
        ("256 experts, sparse files", sparse_experts(), 160),
    ):
        with tempfile.TemporaryDirectory() as place:
            sizes = write_sparse(Path(place), tensors, shards)
            started[name] = sizes | at_start(Path(place), args.rounds)
    result: dict[str, object] = {"start": started, "request_us": per_request(20 * args.rounds)}
    for name, file in (("router_before", args.router_before), ("router_after", args.router_after)):
        if file:
            result[name] = json.loads(Path(file).read_text())
    print(json.dumps(result, indent=1))
    if args.json:
        write_result(Path(args.json), result)


if __name__ == "__main__":
    main()
