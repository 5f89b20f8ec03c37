"""Are ratios that were reached once still so? Each, as recorded and now; a worse one fails.

    python -m bench.ratchet [--rounds 7] [--only NAME] [--update] [--json FILE]

Every question below is a bench whose `measure(rounds)` gives ratios to a baseline of the same round, in CPU
time; lower is better. A ratio is worse when its least round is above the highest recorded one by more than
`TOLERANCE`; a question with such a one is asked a second time, for neighbours on the same memory pass.
Kernels are compared only with a record of the same instruction set. `--update` writes bench/data/ratchet.json
anew; say in the commit why a figure rose.
"""

import importlib
import json
import sys
from collections.abc import Callable
from pathlib import Path

from bench.harness import Spread, command_line, measured, table, write_result
from penstock.engine.native import NativeLibrary

QUESTIONS = {
    "policy.limits": "a request's limits and budget over a bare loop",
    "policy.router_decision": "placement and admission over all that a request costs at the least loaded",
    "policy.kv_index": "a prompt's look-up in the KV index over a naive index",
    "engine.scheduler_host_time": "a scheduler's step over appending to arrays",
    "engine.kernels": "native products and draws over torch's, attention over int8 KV over bfloat16's",
}
ON_KERNELS = ("engine.kernels",)
TOLERANCE = 0.1
RECORD = Path(__file__).parent / "data" / "ratchet.json"


def is_worse(now: Spread, recorded: Spread | None) -> bool:
    """Whether no round of now is within the recorded range and the tolerance."""
    return recorded is not None and now.least > recorded.limit * (1 + TOLERANCE)


def main() -> int:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--only", choices=QUESTIONS, action="append")
    parser.add_argument("--update", action="store_true", help="record these figures")
    args = parser.parse_args()
    isa = NativeLibrary().isa
    record = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    rows: list[tuple[object, ...]] = []
    found: dict[str, dict[str, dict[str, float]]] = {}
    num_worse = 0
    for name in args.only or QUESTIONS:
        print(f"{name}: {QUESTIONS[name]}", file=sys.stderr, flush=True)
        key = f"{name}, {isa}" if name in ON_KERNELS else name
        recorded = {figure: Spread(**each) for figure, each in record.get("ratios", {}).get(key, {}).items()}
        measure: Callable[[int], dict[str, Spread]] = importlib.import_module(f"bench.{name}").measure
        figures = measure(args.rounds)
        if any(is_worse(now, recorded.get(figure)) for figure, now in figures.items()):
            again = measure(args.rounds)
            figures = {
                each: min(now, again[each], key=lambda found: found.least) for each, now in figures.items()
            }
        found[key] = {figure: now.rounded() for figure, now in figures.items()}
        for figure, now in figures.items():
            before = recorded.get(figure)
            worse = is_worse(now, before)
            num_worse += worse
            verdict = "not recorded" if before is None else "WORSE" if worse else "holds"
            rows.append((f"{name}: {figure}", before or "", now, verdict))
    print(table(("ratio, lower is better", "recorded", "now", ""), rows))
    if args.update:
        ratios = record.get("ratios", {}) | found
        RECORD.write_text(json.dumps({"measured": measured(), "ratios": ratios}, indent=1) + "\n")
    write_result(args.json, {"isa": isa, "ratios": found})
    return 0 if args.update else min(num_worse, 1)


if __name__ == "__main__":
    sys.exit(main())
