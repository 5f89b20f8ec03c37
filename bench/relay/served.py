"""How fast is the server as users start it, and what is left of it under overload? `penstock bench`'s tables.

    python -m bench.relay.served [--concurrency 1,8,32] [--duration S | --requests N] [--overload 1,2,5,20]
        [--json FILE] [-- MODEL --serve-flags]

`make bench` runs it: `penstock serve` on a free port, and `penstock bench` at it. With `--overload` requests
come at so many times the rate that the closed loop got at most, whether or not others have ended: goodput is
to hold, though most are refused. JSON goes to bench/out/.
"""

import json
import sys
import time
from pathlib import Path

from bench.harness import OUT, command_line, table
from bench.process import SERVE, Served, load_report
from penstock import rng


def overload_table(levels: list[dict]) -> str:
    """Goodput of open loops, beside the best of them."""
    tokens = [level["goodput_tokens_per_s"] for level in levels]
    rows = [
        (level["name"], f"{each:,.1f}", f"{each / max(*tokens, 1e-9):.0%}", level["requests_failed"])
        for level, each in zip(levels, tokens, strict=True)
    ]
    return table(("arrivals", "good tok/s", "of the best", "refused"), rows)


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("serve", nargs="*", help="arguments of `penstock serve`, after --")
    parser.add_argument("--concurrency", default="1,8,32")
    parser.add_argument("--overload", default="", metavar="TIMES", help="open loops, e.g. 1,2,5,20")
    parser.add_argument("--duration", default="8", help="seconds per level")
    parser.add_argument("--requests", help="per level, instead of --duration")
    parser.add_argument("--seed", default="1")
    args = parser.parse_args()
    path = args.json or OUT / time.strftime("serve-%Y%m%d-%H%M%S.json")
    levels = ("--concurrency", args.concurrency, "--seed", args.seed)
    until = ("--requests", args.requests) if args.requests else ("--duration", args.duration)
    key, place = rng.fresh_token(), OUT / "serve"
    command = (*SERVE, "--log-level", "warning", *args.serve)  # No access log of what is measured.
    with Served(place, "", command=command, cwd=Path.cwd(), PENSTOCK_API_KEY=key) as served:
        report = load_report(served.url, key, *levels, *until, shown=True)
        capacity = max(level["requests_per_s"] for level in report["levels"])
        report["overload"] = list[dict]()
        for times in filter(None, args.overload.split(",")):
            rate = ("--rate", f"{float(times) * capacity:.3f}", "--seed", args.seed)
            report["overload"] += load_report(served.url, key, *rate, *until)["levels"]
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
    if report["overload"]:
        print(overload_table(report["overload"]))
    print(f"ready after {served.ready_s} s; JSON: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
