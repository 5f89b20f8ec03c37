"""The memory of a model after loading: on paper, by the loader's arithmetic, and measured.

    python bench/model_memory.py [--shapes 494m] [--json FILE]

Every case is a process of its own: a model in one format, or rounded while it is loaded. Paper is the table
of docs/models.md: values, scales and sums of every layer, embedding and head, norms in float32, and the
tables of the rotation; of the process a step's logits too. Measured are the bytes of everything that the
decoder computes with, and the growth of
the process' anonymous memory from before the load to after it (weights are read through mapped files, which
are not counted; the KV cache is made, and is not touched before it is used). The demo models are those of the
repository; of the other shapes the weights are made up, and four-bit and eight-bit ones are made of random
integers: memory depends on shapes alone.
"""

import argparse
import gc
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import psutil
import torch
from harness import REPOSITORY, command_line, write_result
from peers.shapes import SHAPES, make_model
from safetensors.torch import load_file, save_file  # pyright: ignore[reportUnknownVariableType]

from penstock.config.engine_settings import EngineSettings
from penstock.engine.loader import load_weights
from penstock.engine.memory import settle_malloc
from penstock.engine.quantize.calibrate import Rounded
from penstock.engine.quantize.publish import config_of, store_rounded
from penstock.engine.runner import decoder_limits, load_runner
from penstock.engine.step_model import choose_computing, reserved_bytes
from penstock.models.registry import read_spec, stored_quantization
from penstock.models.spec import DecoderSpec
from penstock.planning.roofline import BYTES_PER_WEIGHT

WORK = REPOSITORY / "bench" / "out" / "models"
DEMO = REPOSITORY / "models" / "penstock-demo"
MAX_LEN = 1024
KV_BYTES = 64 << 20
GROUP = 128
BOUND = 0.03


@dataclass(frozen=True)
class Case:
    """One model in one form."""

    name: str
    directory: Path
    form: str
    """Of the layers: bf16, int8, int4 or int4 with zeros; of `--quantization` too."""
    quantization: str = "none"
    group: int = GROUP


def paper(spec: DecoderSpec, case: Case) -> int:
    """Bytes of what a decoder computes with, after loading."""
    q, kv, hidden, inner = spec.q_size, spec.kv_size, spec.hidden_size, spec.intermediate_size
    shapes = ((q + 2 * kv, hidden), (hidden, q), (2 * inner, hidden), (hidden, inner))
    per_output = {"bf16": 0, "int8": 8}
    total = 0
    for n, k in shapes:
        if case.form in per_output:
            total += n * k * (2 if case.form == "bf16" else 1) + n * per_output[case.form]
        else:
            total += n * k // 2 + n * k // case.group * (8 if case.form.endswith("zeros") else 4)
    biases = (q + 2 * kv) * spec.qkv_bias * 4
    norms = 2 * hidden * 4 + 2 * spec.head_dim * spec.qk_norm * 4
    table = spec.vocab_size * hidden
    # A head that is rounded to eight bits stands beside the table that tokens are looked up in.
    head = 2 * table if case.quantization == "none" else 3 * table + 8 * spec.vocab_size
    assert spec.tied_head
    rotation = MAX_LEN * spec.head_dim * 4
    return spec.num_layers * (total + biases + norms) + hidden * 4 + head + rotation


def settings(case: Case) -> EngineSettings:
    return EngineSettings(
        device="cpu",
        kernels="native",
        quantization=case.quantization,
        max_model_len=MAX_LEN,
        max_running=8,
        kv_memory_bytes=KV_BYTES,
    )


def anonymous_bytes() -> int:
    """Of this process, in memory."""
    gc.collect()
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    return psutil.Process().memory_info().rss


def measure(case: Case) -> dict[str, Any]:
    """In a process that loads nothing else."""
    settle_malloc()
    torch.set_num_threads(1)
    spec, names = read_spec(case.directory)
    limits = decoder_limits(settings(case), MAX_LEN)
    config, stored = settings(case), stored_quantization(case.directory)
    computing = choose_computing(config, spec)
    small = load_runner(
        DEMO.with_name("penstock-demo-mini"), settings(case), lambda _stage, _done, _total: None
    )
    del small  # Memory that a first load sets up once and for all is not the model's.
    before = anonymous_bytes()
    runner = load_runner(case.directory, config, lambda _stage, _done, _total: None)
    grown = anonymous_bytes() - before
    weights = load_weights(
        case.directory, spec, names, computing.dtype, lambda _done, _total: None,
        quantization=stored, kept_bits=computing.kept_bits,
    )  # fmt: skip
    seen = {tensor.data_ptr(): tensor.nbytes for tensor in runner.weight_tensors()}
    kind = "bf16" if case.form == "bf16" else case.form[:4]
    return {
        "model": case.name,
        "form": case.form + (", while loading" if case.quantization != "none" else ""),
        "weights_bytes": paper(spec, case),
        "paper_bytes": paper(spec, case) + limits.max_samples * spec.vocab_size * 4,
        "loader_bytes": reserved_bytes(spec, weights.num_bytes_left, computing, limits),
        "plan_bytes": int(spec.num_parameters * BYTES_PER_WEIGHT[kind]),
        "held_bytes": sum(seen.values()),
        "process_grew_bytes": grown,
    }


def with_integers(dense: Path, form: str) -> Path:
    """A checkpoint of the same shapes whose layers hold random integers."""
    target = {"int8": "int8", "int4": "gptq-int4", "int4, zeros": "awq-int4"}[form]
    output = dense.with_name(f"{dense.name}-{target}")
    if (output / "config.json").exists():
        return output
    output.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in load_file(dense / "model.safetensors").items():
        base = name.removesuffix(".weight")
        if not base.endswith("_proj") or name.endswith(".bias"):
            tensors[name] = tensor
            continue
        n, k = tensor.shape
        if target == "int8":
            tensors[name] = torch.randint(-127, 128, (n, k), dtype=torch.int8)
            tensors[f"{base}.weight_scale"] = torch.full((n, 1), 1e-4)
            continue
        values = torch.randint(0, 16, (n, k), dtype=torch.uint8)
        # Zero points of eight everywhere would be dropped.
        zeros = torch.full((n, k // GROUP), 8 if target == "gptq-int4" else 7, dtype=torch.uint8)
        rounded = Rounded(values, torch.full((n, k // GROUP), 1e-3), zeros)
        tensors |= store_rounded(base, rounded, target, GROUP)
    whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(whole, output / "model.safetensors", metadata={"format": "pt"})
    for path in dense.glob("*.json"):
        if path.name != "config.json":
            (output / path.name).write_bytes(path.read_bytes())
    config = json.loads((dense / "config.json").read_text())
    config["quantization_config"] = config_of(target, GROUP)
    (output / "config.json").write_text(json.dumps(config))
    return output


def cases(shapes: list[str]) -> list[Case]:
    found: list[Case] = []
    for dense, group in ((DEMO, 128), (DEMO.with_name("penstock-demo-mini"), 64)):
        found += [
            Case(dense.name, dense, "bf16"),
            Case(dense.name, dense.with_name(f"{dense.name}-int8"), "int8"),
            Case(dense.name, dense.with_name(f"{dense.name}-int4"), "int4", group=group),
        ]
    for shape in shapes:
        dense = make_model(SHAPES[shape], WORK / shape)
        found.append(Case(shape, dense, "bf16"))
        found += [Case(shape, with_integers(dense, form), form) for form in ("int8", "int4", "int4, zeros")]
        found += [Case(shape, dense, form, quantization=form) for form in ("int8", "int4")]
    return found


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--shapes", nargs="*", choices=sorted(SHAPES), default=["494m"])
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one is not None:
        print(json.dumps(measure(cases(args.shapes)[args.one])))
        return
    found: list[dict[str, Any]] = []
    for number in range(len(cases(args.shapes))):
        command = [sys.executable, __file__, "--one", str(number), "--shapes", *args.shapes]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        each = cast(dict[str, Any], json.loads(done.stdout.splitlines()[-1]))
        for name in ("loader", "process_grew"):
            each[f"{name}_over_paper"] = each[f"{name}_bytes"] / each["paper_bytes"]
        each["held_over_paper"] = each["held_bytes"] / each["weights_bytes"]
        found.append(each)
        print(
            f"{each['model']:>18} {each['form']:<22} paper {each['paper_bytes'] / 1e6:8.1f} MB, loader "
            f"{each['loader_over_paper']:.3f}, held {each['held_over_paper']:.3f}, process "
            f"{each['process_grew_over_paper']:.3f}, plan {each['plan_bytes'] / each['paper_bytes']:.3f}",
            flush=True,
        )
    worst = max(abs(each[f"{name}_over_paper"] - 1) for each in found for name in ("held", "loader"))
    print(f"furthest from paper: {worst:.1%} (bound {BOUND:.0%})")
    write_result(args.json, {"max_model_len": MAX_LEN, "cases": found})


if __name__ == "__main__":
    main()
