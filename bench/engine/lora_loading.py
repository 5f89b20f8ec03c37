"""The gaps between tokens of 32 streams while an adapter (LoRA) is loaded beside them.

    python -m bench.engine.lora_loading [--shape 494m] [--streams 32] [--rank 16] [--rounds 40] [--awaited]
        [--json FILE]

A worker process as a launcher starts it, spoken to over its socket, answers all streams at once. In every
round `--steps` gaps are taken without a load, then an adapter is ordered and the gaps are taken until it is
in memory, at least as many (`--awaited`: as for a request that waits for it). Told are the percentiles of
both, and the ratio of the 99th; a gap is the time between two messages that carry tokens of all streams.
"""

import json
import math
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.engine.sleep_wake import WORK, Process, submit
from bench.harness import command_line, write_result
from bench.peers.shapes import SHAPES, make_model
from penstock.models.registry import read_spec
from penstock.models.spec import DecoderSpec
from penstock.protocol.worker import StepOutput, WorkerAdapters
from penstock.protocol.worker_parts import LoadAdapter

DIRECTORIES = 4
"""Different adapters; each is loaded under many names, and read each time."""
PROMPT_TOKENS = 32
RAMP_TOKENS = 256
"""That the first streams say before the last one has begun."""


def make_adapter(directory: Path, spec: DecoderSpec, rank: int) -> Path:
    """A PEFT directory with random matrices for all linears."""
    hidden, inner, q_size, kv_size = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    shapes = {
        "self_attn.q_proj": (hidden, q_size), "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size), "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, inner), "mlp.up_proj": (hidden, inner), "mlp.down_proj": (inner, hidden),
    }  # fmt: skip
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(spec.num_layers):
        for name, (inputs, outputs) in shapes.items():
            at = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{at}.lora_A.weight"] = (torch.randn(rank, inputs) * 0.01).bfloat16()
            tensors[f"{at}.lora_B.weight"] = (torch.randn(outputs, rank) * 0.01).bfloat16()
    directory.mkdir(parents=True)
    save_file(tensors, directory / "adapter_model.safetensors")
    targets = sorted(name.rpartition(".")[2] for name in shapes)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": targets}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


class Streams:
    """All streams of one worker, as one series of steps."""

    def __init__(self, process: Process, count: int, tokens: int) -> None:
        self._client, self._count = process.client, count
        for i in range(count):
            prompt = tuple(range(20 + i, 20 + i + PROMPT_TOKENS))
            self._client.send(submit(f"r{i}", prompt, max_tokens=tokens))
        self.loaded: set[str] = set()
        self._last_s = 0.0
        self._step()

    def _step(self) -> float:
        """Waits for the next tokens of all; the seconds since the ones before."""
        while True:
            message = self._client.receive()
            if isinstance(message, WorkerAdapters):
                assert not any(each.error for each in message.adapters), message
                self.loaded |= {each.name for each in message.adapters if each.is_loaded}
            if not isinstance(message, StepOutput):
                continue
            ended = [each.finish for each in message.outputs if each.finish]
            assert not ended, f"a stream ended: {ended[0]}"
            if len(message.outputs) == self._count:
                now = time.perf_counter()
                gap, self._last_s = now - self._last_s, now
                return gap

    def gaps(self, steps: int) -> list[float]:
        """Of so many steps, with nothing beside them."""
        return [self._step() for _ in range(steps)]

    def gaps_with_load(self, steps: int, order: LoadAdapter) -> list[float]:
        """Until the adapter is in memory, and of so many steps at least."""
        self._client.send(order)
        found: list[float] = []
        while len(found) < steps or order.name not in self.loaded:
            found.append(self._step())
        return found


def percentile(gaps: list[float], share: float) -> float:
    """In milliseconds; of the gaps in order, the one that so great a share is not longer than."""
    return round(sorted(gaps)[math.ceil(share * len(gaps)) - 1] * 1e3, 1)


def main() -> None:
    parser = command_line(__doc__, rounds=40)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="494m")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--awaited", action="store_true")
    args = parser.parse_args()
    model = make_model(SHAPES[args.shape], WORK / args.shape)
    spec, _ = read_spec(model)
    plain: list[float] = []
    loading: list[float] = []
    with tempfile.TemporaryDirectory() as place:
        made = [make_adapter(Path(place) / f"{i}", spec, args.rank) for i in range(DIRECTORIES)]
        tokens = args.rounds * args.steps * 4 + RAMP_TOKENS
        limit = PROMPT_TOKENS + tokens
        kv_bytes = 2 * spec.num_layers * spec.kv_size * 2 * (limit + 16) * args.streams
        process = Process(
            model, "none", kv_memory_bytes=kv_bytes, max_model_len=limit, adapter_slots=20,
            max_running=args.streams, tpot_target_ms=0.0,  # All streams run, however long a step takes.
        )  # fmt: skip
        try:
            process.ready()
            streams = Streams(process, args.streams, tokens)
            streams.gaps(8)  # The first ones read prompts beside.
            for i in range(args.rounds):
                plain += streams.gaps(args.steps)
                path = str(made[i % DIRECTORIES])
                order = LoadAdapter(name=f"lora-{i}", path=path, is_wanted=args.awaited)
                loading += streams.gaps_with_load(args.steps, order)
        finally:
            process.end()
    found = {
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "loads": args.rounds,
        "plain": {"gaps": len(plain), "p50_ms": percentile(plain, 0.5), "p99_ms": percentile(plain, 0.99)},
        "loading": {
            "gaps": len(loading), "p50_ms": percentile(loading, 0.5), "p99_ms": percentile(loading, 0.99),
        },
        "p99_ratio": round(percentile(loading, 0.99) / percentile(plain, 0.99), 3),
        "p50_ratio": round(statistics.median(loading) / statistics.median(plain), 3),
    }  # fmt: skip
    print(json.dumps(found, indent=1))
    write_result(args.json, found)


if __name__ == "__main__":
    main()
