"""500 hostile schemas, patterns and grammars: what is each refused with, and what CPU time does it cost?

`python -m bench.grammar.hostile_schemas --json FILE`: CPU of compiling on the threads of
this process and in the trial process, per form. `--limit-ms` fails the run if one costs more.
`--stream` measures something else: the gaps between the tokens of another stream of the same engine, with
nothing to compile and with every form, one after the other, in turns.
"""

import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from bench.harness import command_line, write_result
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import build_core
from penstock.engine.grammar.compiler import GrammarCompiler, GrammarTokens
from penstock.engine.runner import build_runner
from penstock.errors import InvalidRequest
from penstock.kv.hashing import token_array
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import Grammar
from penstock.rng import stream
from penstock.types import RequestId, SamplingParams

CLOCK = SystemClock()
MODEL = Path(__file__).parents[2] / "models" / "penstock-demo-mini"


def nested(depth: int, inner: object, wrap: Callable[[object], object]) -> object:
    for _ in range(depth):
        inner = wrap(inner)
    return inner


def forms() -> list[tuple[str, dict[str, object]]]:
    """Each kind in 25 sizes."""
    found: list[tuple[str, dict[str, object]]] = []
    random = stream(1, "hostile")

    def add(kind: str, **form: object) -> None:
        found.append((kind, form))

    for i in range(1, 26):
        big = i * i * 40
        add("huge enum", json={"enum": [f"value-{j}" for j in range(big)]})
        add("enum of objects", json={"enum": [{"a": j, "b": [j, j]} for j in range(big // 10)]})
        add("many patterns", json={
            "type": "object",
            "properties": {f"k{j}": {"type": "string", "pattern": f"^[a-z]{{1,{j % 50 + 1}}}$"}
                           for j in range(big // 8)},
        })  # fmt: skip
        add("deep arrays", json=nested(i * 30, {}, lambda inner: {"type": "array", "items": inner}))
        add("deep objects", json=nested(
            i * 15, {}, lambda inner: {"type": "object", "properties": {"a": inner}, "required": ["a"]}
        ))  # fmt: skip
        add("deep text", json='{"items":' * (i * 1000) + "{}" + "}" * (i * 1000))
        add("multipleOf", json={"type": "integer", "multipleOf": 10 ** (i // 3 + 1) - 1})
        primes = [101, 103, 107, 109, 113, 127, 131][: i % 7 + 1]
        add("common multiple", json={"allOf": [{"type": "integer", "multipleOf": p} for p in primes]})
        add("patterns together", json={"allOf": [{"type": "string", "pattern": f"a.{{{j}}}b"}
                                                 for j in range(i + 1)]})  # fmt: skip
        pairs = [[(f"{side}{j}", {f"{side}{j}": {"const": 1}}) for side in "ab"] for j in range(i)]
        add("anyOf to the power", json={"allOf": [
            {"anyOf": [{"type": "object", "required": [name], "properties": one} for name, one in pair]}
            for pair in pairs
        ]})  # fmt: skip
        add("references to the power", json={
            "$defs": {f"d{j}": {"allOf": [{"$ref": f"#/$defs/d{j + 1}"}] * 2} for j in range(i)}
            | {f"d{i}": {"type": "string"}},
            "$ref": "#/$defs/d0",
        })  # fmt: skip
        add("references in a circle", json={
            "$defs": {f"d{j}": {"$ref": f"#/$defs/d{(j + 1) % i}"} for j in range(i)}, "$ref": "#/$defs/d0",
        })  # fmt: skip
        add("counts", json={"type": "array", "minItems": 10 ** (i // 2), "items": {"type": "integer"}})
        add("lengths", json={"type": "string", "minLength": 10 ** (i // 2)})
        add("optional properties", json={"type": "object", "minProperties": big // 20,
                                         "properties": {f"k{j}": {} for j in range(big // 10)}})  # fmt: skip
        add("nested repetition", regex="(" * i + "a{1,20}" + "){1,20}" * i)
        add("alternatives", regex="(a|b|ab|ba)*" * i + "c{1,1000}" * i)
        add("Unicode classes", regex="[\\p{L}--\\p{Lu}]{1,500}\\p{N}{1,500}" + "\\P{M}{1,99}" * i)
        add("deep pattern", regex="(" * (i * 400) + "a" + ")*" * (i * 400))
        rules = "\n".join(f'r{j}: r{j + 1} r{j + 1} | "{random.randrange(10)}"' for j in range(i * 20))
        add("rules", grammar=f'start: r0\n{rules}\nr{i * 20}: "x" r0 | "y"')
    return found


def cpu_ns() -> int:
    """Of this process and of the ended children of its children, which the trial process waits for."""
    mine = time.process_time_ns()
    stat = Path(f"/proc/{_trial_pid}/stat").read_text().rpartition(")")[2].split()
    return mine + sum(map(int, stat[11:15])) * 10**9 // os.sysconf("SC_CLK_TCK")


_trial_pid = 0


class Stream:
    """An endless answer of an engine in this process."""

    def __init__(self) -> None:
        config = EngineSettings(prefix_cache=False, kv_memory_bytes=64 << 20)
        runner = build_runner(MODEL, config, CLOCK, lambda _stage, _done, _total: None)
        runner.warm_up()
        self._core = build_core(runner, config, b"bench" * 8, CLOCK)
        self._number = 0

    def gap_ms(self) -> float:
        """One token's time."""
        if not self._core.has_work:
            self._number += 1
            self._core.submit(0, Submit(
                request_id=RequestId(str(self._number)), prompt=token_array((1, 2, 3)).tobytes(),
                sampling=SamplingParams(max_tokens=400),
            ), CLOCK.now_ns())  # fmt: skip
            self._core.step()  # The prompt is no gap.
        began = time.monotonic_ns()
        self._core.step()
        return (time.monotonic_ns() - began) / 1e6


def gaps(compiler: GrammarCompiler) -> dict[str, object]:
    """Of a stream: rounds of quiet, and of compiling, as long as each other's number of tokens."""
    stream, todo = Stream(), [Grammar(form=msgspec.json.encode(form)) for _, form in forms()]
    for _ in range(200):
        stream.gap_ms()
    found: dict[str, list[float]] = {"quiet": [], "hostile": []}
    while todo:
        part, todo = todo[:50], todo[50:]
        num_before = len(found["hostile"])
        for grammar in part:
            future = compiler.compile(b"", grammar)
            while not future.done():
                found["hostile"].append(stream.gap_ms())
        found["quiet"] += [stream.gap_ms() for _ in range(len(found["hostile"]) - num_before)]
    report: dict[str, object] = {"forms": len(forms()), "tokens": len(found["quiet"])}
    p99: dict[str, float] = {}
    for kind, values in found.items():
        ranked = sorted(values)
        p99[kind] = ranked[len(ranked) * 99 // 100]
        report[kind] = {"gap_ms_p50": round(ranked[len(ranked) // 2], 2), "gap_ms_p99": round(p99[kind], 2)}
    return report | {"p99_ratio": round(p99["hostile"] / p99["quiet"], 2)}


def main() -> None:
    global _trial_pid
    parser = command_line(__doc__)
    parser.add_argument("--limit-ms", type=float, default=0)
    parser.add_argument("--stream", action="store_true")
    args = parser.parse_args()
    tokens = GrammarTokens.load(MODEL, 4096)
    assert tokens is not None
    compiler = GrammarCompiler(tokens)
    if args.stream:
        report = gaps(compiler)
        compiler.close()
        print(report)
        write_result(args.json, report)
        return
    _trial_pid = compiler.trial_pid
    results: list[dict[str, object]] = []
    slow: list[str] = []
    for number, (kind, form) in enumerate(forms()):
        began, wall = cpu_ns(), time.monotonic_ns()
        try:
            compiler.compile(b"", Grammar(form=msgspec.json.encode(form))).result()
            said = "compiled"
        except InvalidRequest as error:
            said = str(error)
        cpu_ms, wall_ms = (cpu_ns() - began) / 1e6, (time.monotonic_ns() - wall) / 1e6
        results.append({"kind": kind, "cpu_ms": cpu_ms, "wall_ms": wall_ms, "said": said[:100]})
        if args.limit_ms and cpu_ms > args.limit_ms:
            slow.append(f"{number} {kind}: {cpu_ms:.0f} ms, {said[:80]}")
    compiler.close()
    by_kind: dict[str, dict[str, object]] = {}
    for kind in dict.fromkeys(str(each["kind"]) for each in results):
        mine = [each for each in results if each["kind"] == kind]
        by_kind[kind] = {
            "compiled": sum(each["said"] == "compiled" for each in mine),
            "refused": sum(each["said"] != "compiled" for each in mine),
            "cpu_ms_max": round(max(float(str(each["cpu_ms"])) for each in mine), 1),
            "said": Counter(str(each["said"])[:60] for each in mine).most_common(2),
        }
        print(f"{kind:24}", by_kind[kind])
    times = sorted(float(str(each["cpu_ms"])) for each in results)
    report = {
        "forms": len(times), "cpu_ms_median": round(times[len(times) // 2], 2),
        "cpu_ms_p99": round(times[int(len(times) * 0.99)], 1), "cpu_ms_max": round(times[-1], 1),
        "by_kind": by_kind,
    }  # fmt: skip
    print({key: report[key] for key in ("forms", "cpu_ms_median", "cpu_ms_p99", "cpu_ms_max")})
    write_result(args.json, report)
    print("\n".join(slow))
    sys.exit(bool(slow))


if __name__ == "__main__":
    main()
