"""Every scenario once, with what it found: the figures of the table in docs/testing-overload.md.

    python -m bench.sim.scenarios [--only NAME] [--seed 1] [--jobs 2] [--json FILE]

Exit status 1 if a scenario's criterion fails.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

from bench.harness import command_line
from penstock.clock import NS_PER_S, SystemClock
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import run_scenario
from penstock.sim.scenarios.setup import Knobs


def found(name: str, seed: int) -> dict[str, Any]:
    """The result of one scenario."""
    clock = SystemClock()
    began_ns = clock.now_ns()
    verdict = run_scenario(SCENARIOS[name], Knobs(), seed)
    figures = verdict.played.figures
    return {
        "scenario": name,
        "seed": seed,
        "passes": verdict.passed,
        "findings": [
            [each.words, round(each.value, 4), each.bound, each.passed] for each in verdict.findings
        ],
        "requests": figures.requests,
        "outcomes": dict(figures.outcomes),
        "attainment": round(figures.attainment, 4),
        "ttft_p50_ms": round(figures.ttft_ms.p50, 1),
        "ttft_p95_ms": round(figures.ttft_ms.p95, 1),
        "ttft_max_ms": round(figures.ttft_ms.max, 1),
        "hit_rate": round(figures.hit_rate, 4),
        "jain": round(figures.jain, 4),
        "migrated": sum(record.migrations > 0 for record in verdict.played.records),
        "tenants": {
            key: [each.requests, each.good, round(each.ttft_ms.p95)] for key, each in figures.tenants.items()
        },
        "digest": verdict.played.result.digest,
        "seconds": round((clock.now_ns() - began_ns) / NS_PER_S, 1),
    }


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--only", action="append", choices=sorted(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(args.jobs) as pool:
        for row in pool.map(partial(found, seed=args.seed), args.only or list(SCENARIOS)):
            rows.append(row)
            state = "passes" if row["passes"] else "FAILS"
            print(
                f"{row['scenario']:20} {state}  {row['requests']} requests {row['outcomes']}, attainment "
                f"{row['attainment']}, TTFT {row['ttft_p50_ms']:.0f} / {row['ttft_p95_ms']:.0f} / "
                f"{row['ttft_max_ms']:.0f} ms (p50, p95, max), hit rate {row['hit_rate']}, Jain "
                f"{row['jain']}, {row['migrated']} moved ({row['seconds']} s)"
            )
            for words, value, bound, passed in row["findings"]:
                print(f"{'':22}{words}: {value:g} (bound {bound:g}){'' if passed else '  FAILS'}", flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if all(row["passes"] for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
