"""Random schemas at temperature 1.5: does every finished answer validate, how many schemas are refused, and
how many of the others have an answer within 1,024 tokens?

    python -m bench.grammar.random_schemas [--schemas 10000] [--seed 1] [--drawn-by PYTHON] [--json FILE]

Schemas of this script's own making, as people write them, or with `--drawn-by`, the Python of an environment
with foreign/requirements.txt, what hypothesis-jsonschema draws (foreign/draw.py): odder ones.

The demo model's engine in this process, 32 answers at once. `jsonschema` judges, with formats checked (all
but `time`, for which it takes no time zone). Fails if an answer that ended with "stop" does not validate, or
ended in an error.
"""

import json
import re
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec

from bench.harness import command_line, write_result
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.core import EngineCore, FollowsGrammars, build_core
from penstock.engine.grammar.compiler import GrammarCompiler, GrammarTokens
from penstock.engine.runner import build_runner
from penstock.errors import InvalidRequest
from penstock.kv.hashing import token_array
from penstock.protocol.worker import RequestFinished, Submit
from penstock.protocol.worker_parts import Grammar
from penstock.rng import Stream, stream
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, RequestId, SamplingParams

MODEL = Path(__file__).parents[2] / "models" / "penstock-demo-mini"
DRAW = Path(__file__).parent / "foreign" / "draw.py"
DRAWN_AT_ONCE = 2500
"""More from one seed take Hypothesis ever longer."""
BATCH, MAX_TOKENS, ROOT_DEPTH = 32, 1024, 3
HANG_S = 300
"""An answer that takes longer counts as hanging; all of a batch share the time."""
_KEYWORD = re.compile(r'Unimplemented keys: \["(\w+)"|\bat /(?:\S*/)?([\w$]+):|\'(\w+)\' at /')
_WORDS = ("name", "id", "count", "tags", "owner", "price", "a", "b", "value", "kind")
_PATTERNS = ("^[a-z]+$", "^[A-Z]{2,4}$", "[0-9]{3}", "^(red|green)$", "^a.{0,8}z$", "x", "^\\d{4}-\\d{2}$")
_FORMATS = ("date", "time", "date-time", "uuid", "email", "ipv4", "hostname", "duration", "uri")
_REFUSABLE = (
    {"not": {"type": "null"}}, {"uniqueItems": True}, {"contains": {}}, {"propertyNames": {"maxLength": 3}},
    {"if": {}, "then": {}}, {"dependentRequired": {"a": ["b"]}}, {"unevaluatedProperties": False},
)  # fmt: skip


def schema(random: Stream, depth: int = ROOT_DEPTH) -> dict[str, Any]:
    """One schema; about a tenth of them have a keyword that cannot be enforced."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    if depth:
        kinds += ["object"] * 4 + ["array"] * 2 + ["anyOf", "allOf", "types", "tuple", "ref"]
    found = _MAKE[random.choice(kinds)](random, depth)
    if random.random() < 0.03:
        found |= random.choice(_REFUSABLE)
    return found


def _string(random: Stream, _depth: int) -> dict[str, Any]:
    found: dict[str, Any] = {"type": "string"}
    way = random.random()
    if way < 0.25:
        found["pattern"] = random.choice(_PATTERNS)
    elif way < 0.45:
        found["format"] = random.choice(_FORMATS)
    elif way < 0.9:
        found["maxLength"] = random.randrange(1, 40)
        if random.random() < 0.4:
            found["minLength"] = random.randrange(found["maxLength"] + 1)
    return found


def _integer(random: Stream, _depth: int) -> dict[str, Any]:
    low = random.randrange(-1000, 1000)
    found: dict[str, Any] = {"type": "integer"}
    if random.random() < 0.7:
        found |= {"minimum": low, "maximum": low + random.randrange(500)}
    elif random.random() < 0.3:
        found["multipleOf"] = random.choice((2, 3, 5, 10))
    return found


def _number(random: Stream, _depth: int) -> dict[str, Any]:
    low = round(random.uniform(-50, 50), 2)
    names = ("minimum", "maximum") if random.random() < 0.5 else ("exclusiveMinimum", "exclusiveMaximum")
    bounds = dict(zip(names, (low, round(low + random.uniform(0.5, 90), 2)), strict=True))
    return {"type": "number"} | (bounds if random.random() < 0.7 else {})


def _object(random: Stream, depth: int) -> dict[str, Any]:
    names = random.sample(_WORDS, random.randrange(1, 6))
    properties = {name: schema(random, depth - 1) for name in names}
    required = [name for name in names if random.random() < 0.7]
    found: dict[str, Any] = {"type": "object", "properties": properties, "required": required}
    if random.random() < 0.8:
        found["additionalProperties"] = False
    elif random.random() < 0.5:
        found["additionalProperties"] = schema(random, 0)
    return found


def _array(random: Stream, depth: int) -> dict[str, Any]:
    low = random.randrange(3)
    found: dict[str, Any] = {"type": "array", "items": schema(random, depth - 1)}
    return found | ({"minItems": low, "maxItems": low + random.randrange(4)} if random.random() < 0.8 else {})


def _tuple(random: Stream, depth: int) -> dict[str, Any]:
    parts = [schema(random, depth - 1) for _ in range(random.randrange(1, 4))]
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": len(parts)}


def _ref(random: Stream, depth: int) -> dict[str, Any]:
    """A tree of itself, at the root."""
    if depth < ROOT_DEPTH:
        return _object(random, depth)
    node = {"type": "object", "properties": {
        "value": schema(random, 0),
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2},
    }, "required": ["value"], "additionalProperties": False}  # fmt: skip
    return {"$ref": "#/$defs/node", "$defs": {"node": node}}


_MAKE: dict[str, Any] = {
    "string": _string, "integer": _integer, "number": _number, "object": _object, "array": _array,
    "tuple": _tuple, "ref": _ref,
    "boolean": lambda *_: {"type": "boolean"},
    "null": lambda *_: {"type": "null"},
    "enum": lambda random, _: {"enum": random.sample(["x", "yes", 3, 4.5, None, True, ["a"], {"b": 1}], 3)},
    "const": lambda random, _: {"const": random.choice(["é\n", 7, {"k": [1, 2]}, False])},
    "anyOf": lambda random, depth: {"anyOf": [schema(random, depth - 1) for _ in range(2)]},
    "allOf": lambda random, depth: {"allOf": [schema(random, depth - 1), {"description": "both"}]},
    "types": lambda random, _: {"type": random.sample(["string", "integer", "null", "boolean"], 2)},
}  # fmt: skip


class Answers:
    """The engine, which is given the next accepted schema whenever an answer ends."""

    def __init__(self) -> None:
        clock = SystemClock()
        config = EngineSettings(max_running=BATCH, kv_memory_bytes=128 << 20)
        runner = build_runner(MODEL, config, clock, lambda _stage, _done, _total: None)
        tokens = GrammarTokens.load(MODEL, runner.info.vocab_size)
        assert tokens is not None
        assert isinstance(runner, FollowsGrammars), "grammars are followed on the CPU"
        runner.use_grammars(tokens)
        self.compiler = GrammarCompiler(tokens)
        self.core: EngineCore = build_core(runner, config, b"bench" * 8, clock)
        self.tokenizer: Tokenizer = tokens.tokenizer
        self._eos = tokens.eos_ids

    def submit(self, number: int, asked: dict[str, Any]) -> None:
        """Start an answer.

        Raises:
            InvalidRequest: the schema is refused.
        """
        grammar = Grammar(form=msgspec.json.encode({"json": asked}))
        compiled = self.compiler.compile(b"%d" % number, grammar).result()
        prompt = token_array(self.tokenizer.encode("Answer in JSON:"))
        how = SamplingParams(temperature=1.5, seed=number, max_tokens=MAX_TOKENS, stop_token_ids=self._eos)
        message = Submit(
            request_id=RequestId(str(number)), prompt=prompt.tobytes(), sampling=how, grammar=grammar
        )
        self.core.submit(0, message, 0, compiled)

    def over(self) -> Iterator[tuple[int, list[int], Any]]:
        """Run one step; answers' new tokens, and ends."""
        for output in self.core.step().get(0, []):
            yield int(output.request_id), list(output.token_ids), output.finish


def drawn(python: str, count: int, seed: int) -> list[dict[str, Any]]:
    """As many schemas of hypothesis-jsonschema's, of as many seeds from `seed` on as that takes."""
    lines = list[str]()
    while left := count - len(lines):
        command = [python, str(DRAW), str(min(left, DRAWN_AT_ONCE)), str(seed)]
        found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        assert len(found) == min(left, DRAWN_AT_ONCE), f"{len(found)} schemas were drawn"
        lines, seed = lines + found, seed + 1
    return [json.loads(line) for line in lines]


def keyword_of(refusal: str) -> str:
    """The keyword that a refusal names; the refusal's beginning if it names none."""
    found = _KEYWORD.search(refusal)
    return next(filter(None, found.groups()), refusal[:70]) if found else refusal[:70]


class Tally:
    """The results of the schemas so far."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.counts, self.refusals = Counter[str](), Counter[str]()
        self.wrong: list[str] = []
        self.slowest_s = 0.0
        self._judge = jsonschema.FormatChecker(set(jsonschema.FormatChecker.checkers) - {"time"})

    def refused(self, error: InvalidRequest) -> None:
        """A schema was."""
        self.counts["refused"] += 1
        self.refusals[keyword_of(str(error))] += 1

    def ended(self, what: str, text: str, num_tokens: int, finish: RequestFinished, took_s: float) -> None:
        """An answer has; `what` is its schema as JSON."""
        self.counts["tokens"] += num_tokens
        self.counts[finish.reason.value] += 1
        self.counts["hangs"] += took_s > HANG_S
        self.slowest_s = max(self.slowest_s, round(took_s, 1))
        if finish.reason is FinishReason.STOP:
            try:
                jsonschema.validate(json.loads(text), json.loads(what), format_checker=self._judge)
            except (ValueError, jsonschema.ValidationError) as error:
                said = str(error).partition("\n")[0]
                self.wrong.append(f"{what[:300]}: {text[:200]!r}: {said[:200]}")
        elif finish.reason is FinishReason.ERROR:
            self.wrong.append(f"{what[:300]}: {finish.error}")

    def report(self, schemas: int, seconds: float) -> dict[str, Any]:
        """All of it."""
        self.counts["invalid"] += len(self.wrong)
        accepted = schemas - self.counts["refused"]
        return {
            "schemas": schemas, "seed": self.seed, "seconds": round(seconds, 1),
            "refused_share": round(self.counts["refused"] / schemas, 4),
            "finished_share_of_accepted": round(self.counts["stop"] / max(accepted, 1), 4),
            "invalid": self.counts["invalid"], "hangs": self.counts["hangs"],
            "slowest_answer_s": self.slowest_s, "counts": dict(self.counts),
            "refused_by_keyword": dict(self.refusals.most_common()),
        }  # fmt: skip


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--schemas", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--drawn-by", metavar="PYTHON")
    args = parser.parse_args()
    tally, random = Tally(args.seed), stream(args.seed, "schemas")
    schemas = (
        drawn(args.drawn_by, args.schemas, args.seed) if args.drawn_by
        else [schema(random) for _ in range(args.schemas)]
    )  # fmt: skip
    waiting, answers = deque(enumerate(schemas)), Answers()
    running: dict[int, tuple[dict[str, Any], list[int], float]] = {}
    began = time.monotonic()
    while waiting or running:
        while waiting and len(running) < BATCH:
            number, asked = waiting.popleft()
            try:
                answers.submit(number, asked)
                running[number] = (asked, [], time.monotonic())
            except InvalidRequest as error:
                tally.refused(error)
        for number, token_ids, finish in answers.over():
            asked, known_ids, started = running[number]
            known_ids += token_ids
            if finish is None:
                continue
            del running[number]
            text = answers.tokenizer.decode(known_ids)
            tally.ended(json.dumps(asked), text, len(known_ids), finish, time.monotonic() - started)
    report = tally.report(args.schemas, time.monotonic() - began)
    print(json.dumps(report, indent=1))
    print("\n".join(tally.wrong[:20]))
    write_result(args.json, report)
    answers.compiler.close()
    sys.exit(bool(tally.wrong))


if __name__ == "__main__":
    main()
