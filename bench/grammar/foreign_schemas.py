"""Schemas that others wrote: how many are enforced, what refuses the others, and what compiling costs.

`make bench-schemas`: the schemas of the packages of foreign/requirements.txt (configuration formats,
OpenAPI's own, Kubernetes, typed models of clients), which are installed, not copied here. CPU time is that of
this process, for an accepted schema.
"""

import json
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

import msgspec

from bench.harness import command_line, write_result
from penstock.engine.grammar.compiler import GrammarCompiler, GrammarTokens
from penstock.errors import InvalidRequest
from penstock.protocol.worker_parts import Grammar

HERE = Path(__file__).parent
MODEL = HERE.parents[1] / "models" / "penstock-demo-mini"


def why_of(message: str) -> str:
    """The cause of a schema's refusal, in few words: the keyword, if it is one."""
    for pattern, why in (
        (r"bytes, and \d+ is the bound", "over 256 KiB"),
        (r"too large: \d+ units", "over the bound on cost"),
        (r"ways, and \d+ is the bound|patterns hold together", "over the bound on alternatives"),
        (r"too much time|complex|too many|limit", "over a limit of the compiler"),
        (r"nothing matches", "nothing matches it"),
        (r"nested too deeply", "nested too deeply"),
        (r"another document", "$ref to another document"),
        (r"oneOf constraints", "oneOf"),
        (r"min/maxProperties", "minProperties, maxProperties"),
    ):
        if re.search(pattern, message):
            return why
    found = re.search(r"Unimplemented keys: \[([^\]]*)\]", message)
    if found:
        return found[1].replace('"', "")
    found = re.search(r"enforced(?: at \S*?/([^/ :]+))?: (.{0,60})", message)
    return (found[1] or found[2]) if found else message[:60]


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--python", required=True, help="of the environment that has the packages")
    parser.add_argument("--show", action="store_true", help="print each refusal")
    args = parser.parse_args()
    command = [args.python, str(HERE / "foreign" / "collect.py")]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    tokens = GrammarTokens.load(MODEL, 4096)
    assert tokens is not None
    compiler = GrammarCompiler(tokens)
    packages: dict[str, Counter[str]] = {}
    whys: Counter[str] = Counter()
    times: list[float] = []
    for line in lines:
        package, name, schema = json.loads(line)
        form = msgspec.json.encode({"json": schema})
        began = time.process_time_ns()
        try:
            compiler.compile(b"", Grammar(form=form)).result()
            said = "accepted"
            times.append((time.process_time_ns() - began) / 1e6)
        except InvalidRequest as error:
            said = "refused"
            whys[why_of(str(error))] += 1
            if args.show:
                print(f"{package} {name} ({len(form)} bytes): {str(error)[:300]}")
        packages.setdefault(package, Counter())[said] += 1
    compiler.close()
    times.sort()
    report = {
        "schemas": len(lines),
        "accepted": len(times),
        "refused_by": dict(whys.most_common()),
        "cpu_ms_p50": round(times[len(times) // 2], 2),
        "cpu_ms_p99": round(times[int(len(times) * 0.99)], 2),
        "by_package": {name: dict(counts) for name, counts in packages.items()},
    }
    print(json.dumps(report, indent=1))
    write_result(args.json, report)


if __name__ == "__main__":
    main()
