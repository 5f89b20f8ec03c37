"""Grammars beside free text over HTTP, of our server and then of vLLM with its default backend.

    python -m bench.grammar.peers [--shape 28m] [--rounds 3] [--batch 32] [--tokens 24] [--running vllm=PORT]
        [--json FILE]

The kinds of cost.py, by 32 streams at once, in rounds with free text, which paces them, before and behind in
turn. Of the demo model, or of a shape with random weights (peers/shapes.py). Time per token is that between a
stream's first and last token, so neither prompts nor compiling are in it; time per character is of whole
answers, and tells of long keys. The first round does not count. `--running` measures a server of the model
that was started before. vLLM is installed by bench/peers/install_vllm.sh.
"""

import contextlib
import http.client
import json
import os
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bench.grammar.cost import DEMO, KINDS
from bench.harness import command_line, write_result
from bench.peers.engines import OUT, Variant, launch, missing, versions
from bench.peers.servers import serving
from bench.peers.shapes import SHAPES, make_model
from bench.process import free_port

VARIANTS = (Variant("ours", "bf16", 16), Variant("vllm", "bf16", 16))
LONG_KEYS_TOKENS = 1000
"""At most, of an answer with long keys, which ends by itself."""


@dataclass(frozen=True)
class Load:
    """The load."""

    model: Path
    batch: int
    tokens: int
    rounds: int


def answer(port: int, load: Load, kind: str, seed: int) -> tuple[float, float]:
    """Of one stream: milliseconds per token behind its first, and per character of all of it."""
    body: dict[str, Any] = {
        "model": load.model.name, "prompt": "Write down what you know about rivers.", "temperature": 1.0,
        "seed": seed, "max_tokens": LONG_KEYS_TOKENS if kind == "long_keys" else load.tokens, "stream": True,
        "stream_options": {"include_usage": True},
    }  # fmt: skip
    if KINDS[kind] is None:
        body["ignore_eos"] = True
    else:
        body["structured_outputs"] = KINDS[kind]
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    began = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    reported = connection.getresponse()
    assert reported.status == 200, reported.read()
    first = last = 0.0
    tokens = characters = 0
    for line in reported:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        if chunk.get("usage"):
            tokens = chunk["usage"]["completion_tokens"]
        if chunk["choices"] and chunk["choices"][0]["text"]:
            last = time.monotonic()
            first = first or last
            characters += len(chunk["choices"][0]["text"])
    connection.close()
    return 1e3 * (last - first) / max(tokens - 1, 1), 1e3 * (last - began) / characters


def batch_of(port: int, load: Load, kind: str, number: int) -> tuple[float, float]:
    """Milliseconds per token and per character of as many streams at once."""
    with ThreadPoolExecutor(load.batch) as threads:
        seeds = range(1000 * number, 1000 * number + load.batch)
        found = list(threads.map(lambda seed: answer(port, load, kind, seed), seeds))
    token, character = (statistics.mean(times) for times in zip(*found, strict=True))
    print(f"{kind} {number}: {token:.1f} ms per token, {character:.2f} per character", flush=True)
    return token, character


def spread(values: list[float]) -> dict[str, float]:
    return {
        "median": round(statistics.median(values), 3), "least": round(min(values), 3),
        "most": round(max(values), 3),
    }  # fmt: skip


def measured(port: int, load: Load) -> dict[str, object]:
    """Of each kind: time per token and per character, and these over those of the round's free text."""
    made: list[dict[str, tuple[float, float]]] = []
    for number in range(load.rounds + 1):
        kinds = list(KINDS)[:: 1 if number % 2 else -1]
        made.append({kind: batch_of(port, load, kind, number) for kind in kinds})
    made = made[1:]
    return {
        kind: {
            "ms_per_token": spread([each[kind][0] for each in made]),
            "ms_per_character": spread([each[kind][1] for each in made]),
            "token_time_to_free": spread([each[kind][0] / each["free"][0] for each in made]),
            "character_time_to_free": spread([each[kind][1] / each["free"][1] for each in made]),
        }
        for kind in KINDS
    }


@contextlib.contextmanager
def server_of(variant: Variant, model: Path, running: dict[str, int]) -> Iterator[int]:
    """The port of a server of it."""
    if variant.engine in running:
        yield running[variant.engine]
        return
    port = free_port()
    how = launch(variant, model, port)
    # Nothing is refused for the time that it would wait: vLLM refuses nothing either.
    files = {path: f"{text}admission: {{ttft_target_ms: 0}}\n" for path, text in how.files.items()}
    log = OUT / f"grammar-peers-{variant.engine}.log"
    with serving(replace(how, files=files), model.name, port, log) as server:
        yield server.port


def main() -> None:
    parser = command_line(__doc__, rounds=3)
    parser.add_argument("--shape", choices=SHAPES, help="instead of the demo model")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--running", action="append", default=[], metavar="ENGINE=PORT")
    args = parser.parse_args()
    running = {engine: int(port) for engine, _, port in (each.partition("=") for each in args.running)}
    model = make_model(SHAPES[args.shape], OUT / "models" / args.shape) if args.shape else Path(DEMO)
    load = Load(model, args.batch, args.tokens, args.rounds)
    report: dict[str, object] = {
        "model": model.name, "batch": args.batch, "rounds": args.rounds, "tokens": args.tokens,
        "cores": os.cpu_count(),
        "versions": versions([variant for variant in VARIANTS if not missing(variant)]),
    }  # fmt: skip
    for variant in VARIANTS:
        if why := missing(variant):
            print(f"{variant.name}: {why}")
            continue
        with server_of(variant, model, running) as port:
            report[variant.engine] = measured(port, load)
    print(json.dumps(report, indent=1))
    write_result(args.json, report)


if __name__ == "__main__":
    main()
