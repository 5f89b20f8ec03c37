"""What a model's identity costs a worker's start, with warm and with cold files.

    python -m bench.engine.identity_cost [--rounds 9] [--tree . OLD] [--json FILE]

The demo models, and checkpoints of any size as sparse files: their headers are real, and of every tensor the
page in its middle; the rest are holes, which take no room on the disk. "cold" asks the system to forget the
pages of all files before each round. Each tree measures in a process of its own, in turns with the others.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from bench.harness import REPOSITORY, Spread, command_line, in_turns, ratio, spread, table, write_result

TOKENIZER_BYTES = 17_000_000
"""As large as that of Llama 3."""
PAGE = 4096
CHILD = """
import sys, time
from pathlib import Path
from penstock.engine.fingerprint import fingerprint
for line in sys.stdin:
    began_ns, cpu_ns = time.perf_counter_ns(), time.process_time_ns()
    found = fingerprint(Path(line.strip()))
    print(found.checkpoint, time.perf_counter_ns() - began_ns, time.process_time_ns() - cpu_ns, flush=True)
"""


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
    """Of a mixture of 256 experts in 58 layers: 44,834 tensors, 1.3 TB."""
    width, inner = 7168, 2048
    for layer in range(58):
        for expert in range(256):
            for name in ("gate_proj", "up_proj", "down_proj"):
                yield f"model.layers.{layer}.mlp.experts.{expert}.{name}.weight", 2 * width * inner
        for name in ("q_a_proj", "q_b_proj", "kv_a_proj", "kv_b_proj", "o_proj"):
            yield f"model.layers.{layer}.self_attn.{name}.weight", 2 * width * 1536


def write_sparse(directory: Path, tensors: Iterator[tuple[str, int]], num_shards: int) -> dict[str, object]:
    """A checkpoint of holes with a page in the middle of every tensor. Returns its sizes."""
    every = list(tensors)
    per_shard = -(-len(every) // num_shards)
    places: dict[str, str] = {}
    page = os.urandom(PAGE)
    for shard in range(num_shards):
        file = f"model-{shard:05d}-of-{num_shards:05d}.safetensors"
        header: dict[str, object] = {}
        end, middles = 0, list[int]()
        for name, size in every[shard * per_shard : (shard + 1) * per_shard]:
            header[name] = {"dtype": "BF16", "shape": [size // 2], "data_offsets": [end, end + size]}
            places[name] = file
            middles.append(end + size // 2 - PAGE // 2)
            end += size
        encoded = json.dumps(header).encode()
        with (directory / file).open("wb") as out:
            out.write(len(encoded).to_bytes(8, "little") + encoded)
            begin = out.tell()
            out.truncate(begin + end)
            for middle in middles:
                os.pwrite(out.fileno(), page, begin + middle)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (directory / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    (directory / "tokenizer.json").write_bytes(os.urandom(TOKENIZER_BYTES))
    return {
        "tensors": len(every),
        "files": num_shards,
        "gigabytes": round(sum(size for _, size in every) / 1e9, 1),
    }


def forget_pages(directory: Path) -> None:
    """Ask the system to read the files anew."""
    for path in directory.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Tree:
    """A process that makes identities with the code of one source tree."""

    def __init__(self, tree: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", CHILD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,
        )

    def measure(self, directory: Path, *, cold: bool) -> tuple[str, float, float]:
        """The checkpoint's digest, and milliseconds of time and of CPU."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if cold:
            forget_pages(directory)
        print(directory, file=self._process.stdin, flush=True)
        digest, wall_ns, cpu_ns = self._process.stdout.readline().split()
        return digest, int(wall_ns) / 1e6, int(cpu_ns) / 1e6

    def close(self) -> None:
        self._process.communicate()


def compare(trees: dict[str, Tree], directory: Path, rounds: int) -> dict[str, object]:
    """Milliseconds of each tree, and the first tree's time over that of each other one."""
    found: dict[str, object] = {}
    first, *others = trees
    for words, cold in (("warm", False), ("cold", True)):
        runs = in_turns(
            rounds, {name: partial(each.measure, directory, cold=cold) for name, each in trees.items()}
        )
        found[words] = {
            name: {
                "ms": spread(ms for _, ms, _ in each).rounded(2),
                "cpu_ms": spread(c for *_, c in each).rounded(2),
            }
            for name, each in runs.items()
        } | {
            f"{first} over {other}": ratio(
                [ms for _, ms, _ in runs[first]], [ms for _, ms, _ in runs[other]]
            ).rounded()
            for other in others
        }
        found["one identity"] = len({digest for each in runs.values() for digest, *_ in each}) == 1
    return found


def show(started: dict[str, Any], trees: Sequence[str]) -> str:
    """A row for each checkpoint, state of its files and tree."""
    rows: list[Sequence[object]] = []
    for checkpoint, found in started.items():
        for words in ("warm", "cold"):
            for name in trees:
                wall, cpu = (Spread(**found[words][name][kind]) for kind in ("ms", "cpu_ms"))
                rows.append((checkpoint, words, name, wall, cpu))
    return table(("checkpoint", "files", "tree", "ms", "CPU ms"), rows)


def main() -> None:
    """Measure, print, keep."""
    parser = command_line(__doc__, rounds=9)
    parser.add_argument("--tree", type=Path, nargs="+", default=[REPOSITORY])
    args = parser.parse_args()
    trees = {str(tree): Tree(tree) for tree in args.tree}
    started: dict[str, dict[str, object]] = {}
    for name in ("penstock-demo-mini", "penstock-demo"):
        started[name] = compare(trees, REPOSITORY / "models" / name, args.rounds)
    for name, tensors, shards in (
        ("70B dense, sparse files", dense_70b(), 30),
        ("256 experts, sparse files", sparse_experts(), 160),
    ):
        with tempfile.TemporaryDirectory() as place:
            sizes = write_sparse(Path(place), tensors, shards)
            started[name] = sizes | compare(trees, Path(place), args.rounds)
    with ExitStack() as stack:
        for tree in trees.values():
            stack.callback(tree.close)
    print(show(started, list(trees)))
    write_result(args.json, {"start": started})


if __name__ == "__main__":
    main()
