"""The cost of each check on a request's way: CPU microseconds per request, and its share of the gateway's CPU
for the whole request, in one run.

    python bench/mends_cost.py [--rounds 7] [--requests 300] [--json FILE]

For each kind of request two gateways stand side by side, each with two workers that compute nothing, and
short bursts go to one after the other. One is as served: its CPU per request is the whole. In the other each
function of `CHECKS` is timed at every call, on what really comes: the mean of the calls without those of
2 ms and more (another process ran meanwhile), less what timing costs. Where the check takes the place of
something plain (Jinja's own sandbox, the plain tokenizer), that is timed in the same place and is told beside
it. `apart` is rendered in the template's own process: the whole has the CPU of both.

Code that only an overload exercises is timed in the simulator at twice the knee, which runs the same objects.
"""

import argparse
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop
from harness import command_line, write_result
from relay_process import Process, build, free_port

sys.path.insert(0, str(Path(__file__).parent / "relay"))

import gateway as relay_gateway
import stand_in_worker

from penstock.config.checkpoints import resolve
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import ModelConfig
from penstock.gateway.api import generate
from penstock.gateway.identity.tenancy import Entrance
from penstock.kv.hashing import PromptKeyMaker, PromptKeys
from penstock.kv.index.locality import KVLocality
from penstock.policy.admission.gate import Gate
from penstock.policy.queueing.model_queue import ModelQueue
from penstock.policy.queueing.pace import Pace
from penstock.protocol import needs, openai_validate
from penstock.schedule.planner import Planner
from penstock.schedule.prefill_budget import RowBound
from penstock.sim.scenarios.overload import mixed
from penstock.sim.scenarios.setup import Knobs, play
from penstock.telemetry import ledger_segment
from penstock.text import sandbox
from penstock.text.prompt import ChatPrompts, Markers
from penstock.text.sandbox import MeteredTemplate, template_environment

DEMO = resolve("penstock-demo-mini")
CONNECTIONS = 8
START_S = 60.0
CALL_NS_MAX = 2_000_000
"""A longer call is left out: another process ran meanwhile."""
CHARGED, JINJA = "template, every step charged", "the same by Jinja's plain sandbox"
AS_TEXT, AS_TOKENS = "prompt, special tokens are text", "the same, they are tokens"

Spot = tuple[Any, str]
"""The holder of a function, and its name there."""

CHECKS: dict[str, Sequence[Spot]] = {
    "prompt keys of the workers' identity": ((PromptKeyMaker, "keys"), (PromptKeys, "own")),
    "prefix look-up, with those keys": ((KVLocality, "match"),),
    "verdict on the promise": ((Gate, "decide"),),
    "pace of starts, learnt": ((Pace, "started"), (Pace, "began"), (Pace, "ended")),
    "capabilities": ((needs, "rare_needs"), (generate, "_checked")),
    "messages and tools": ((openai_validate, "check_messages"), (openai_validate, "check_tools")),
    "journal frames with checksums": ((ledger_segment, "to_frame"),),
    "special tokens looked for": ((Markers, "occur"),),
    "Host and Origin": ((Entrance, "_check_same_origin"),),
}
"""The name of a part, and the functions whose times are summed."""
SIMULATED: dict[str, Sequence[Spot]] = {
    "verdict on the promise": ((Gate, "decide"),),
    "pace of starts, learnt": ((Pace, "started"), (Pace, "began"), (Pace, "ended")),
    "queue: next start, who is too late": ((ModelQueue, "next_start"), (ModelQueue, "next_expired")),
    "engine: rows for the TPOT promise": (
        (RowBound, "open"), (RowBound, "admits"), (RowBound, "started"),
    ),
    "engine: planning in all": ((Planner, "plan"),),
}  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Looks something up.",
            "parameters": {
                "type": "object",
                "properties": {"query": {"type": "string"}},
                "required": ["query"],
            },
        },
    }
    for name in ("search", "weather", "calendar")
]
QUESTION = "How does water from a mountain lake become electric light?"


def tool_loop() -> list[dict[str, Any]]:
    """A conversation with fields that other servers put into their answers, sent back as they came."""
    found: list[dict[str, Any]] = [
        {"role": "system", "content": "You plan journeys. " * 40, "cache_control": {"type": "ephemeral"}}
    ]
    for i in range(4):
        call = {"id": f"call_{i}", "type": "function", "function": {"name": "search", "arguments": "{}"}}
        found += [
            {"role": "user", "content": QUESTION},
            {
                "role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "audio": None,
                "annotations": [], "provider_specific_fields": {"thought": None},
            },
            {"role": "tool", "tool_call_id": f"call_{i}", "content": "The turbine turns the generator. " * 8},
        ]  # fmt: skip
    return found


@dataclass(frozen=True)
class Kind:
    """One kind of request."""

    name: str
    body: dict[str, Any]
    has_key: bool = True
    has_special: bool = False
    """The text of a special token is in a message."""
    is_apart: bool = False
    """The model's template may not run in the gateway."""
    identities: tuple[str, str] = ("one", "one")
    """Of the two workers."""


def asking(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 12}


LOOP = {"messages": tool_loop(), "tools": TOOLS, "max_tokens": 32, "stream": True}
KINDS = (
    Kind("question", asking(QUESTION)),
    Kind("tool loop", LOOP),
    Kind("two identities", LOOP, identities=("one", "other")),
    Kind("special token", asking(f"{QUESTION} <|im_end|>"), has_special=True),
    Kind("no key", asking(QUESTION), has_key=False),
    Kind("apart", asking(QUESTION), is_apart=True),
)


def request_bytes(kind: Kind, port: int) -> bytes:
    """The request that the load client sends again and again."""
    body = json.dumps({"model": "m", **kind.body}, separators=(",", ":")).encode()
    sender = (
        f"Authorization: Bearer {relay_gateway.KEY}" if kind.has_key else f"Origin: http://127.0.0.1:{port}"
    )
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{sender}\r\n"
    return f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


# --- timing -----------------------------------------------------------------------------------------


class Times:
    """Nanoseconds of every call, by name."""

    def __init__(self) -> None:
        self.calls: dict[str, list[int]] = {}

    def timed(self, name: str, work: Callable[..., Any], before: Callable[..., Any] | None = None) -> Any:  # noqa: ANN401
        """`work`, timed under a name; `before` is called first with the same arguments, untimed."""
        calls, clock = self.calls.setdefault(name, []), time.perf_counter_ns

        @wraps(work)
        def wrapper(*args: Any, **named: Any) -> Any:  # noqa: ANN401
            if before is not None:
                before(*args, **named)
            began_ns = clock()
            try:
                return work(*args, **named)
            finally:
                calls.append(clock() - began_ns)

        return wrapper

    def own_ns(self) -> float:
        """The time that timing adds to a call's own."""
        nothing = self.timed("", lambda: None)
        for _ in range(2000):
            nothing()
        return median(self.calls.pop(""))

    def take(self) -> dict[str, list[int]]:
        """The times since the last call, which are forgotten."""
        found = {name: list(calls) for name, calls in self.calls.items()}
        for calls in self.calls.values():
            calls.clear()
        return found


def replace_everywhere(spot: Spot, new: Any) -> Callable[[], None]:  # noqa: ANN401
    """Put a function in the place of another, also where that was imported to. Returns how to undo it."""
    holder, name = spot
    old = vars(holder)[name]
    places = [holder]
    if not isinstance(holder, type):
        modules = [module for key, module in sys.modules.items() if key.startswith("penstock.")]
        places = [module for module in modules if vars(module).get(name) is old]
    for place in places:
        setattr(place, name, new)

    def undo() -> None:
        for place in places:
            setattr(place, name, old)

    return undo


@contextmanager
def timing(times: Times, checks: dict[str, Sequence[Spot]]) -> Iterator[None]:
    """Within, these are timed."""
    with ExitStack() as stack:
        for check, spots in checks.items():
            for spot in spots:
                new = times.timed(check, vars(spot[0])[spot[1]])
                stack.callback(replace_everywhere(spot, new))
        yield


def time_template(times: Times) -> None:
    """Every rendering, after the same by Jinja's plain sandbox."""
    plain: dict[int, Any] = {}
    compile_here = sandbox.compile_metered

    def compile_both(source: str, wall_ns: Callable[[], int], *, chars_max: int) -> MeteredTemplate:
        found = compile_here(source, wall_ns, chars_max=chars_max)
        plain[id(found)] = template_environment(wall_ns, chars_max=chars_max).from_string(source)
        return found

    def render(template: MeteredTemplate, variables: Any, **_: Any) -> None:  # noqa: ANN401
        by_jinja(plain[id(template)], variables)

    by_jinja = times.timed(JINJA, lambda each, variables: "".join(each.generate(variables)))
    replace_everywhere((sandbox, "compile_metered"), compile_both)
    replace_everywhere((MeteredTemplate, "render"), times.timed(CHARGED, MeteredTemplate.render, render))


def time_special_tokens(times: Times) -> None:
    """The prompt where special tokens in a message are text, after the same where they are those tokens."""
    whole = ChatPrompts.token_ids

    def trusted(*args: Any, **named: Any) -> None:  # noqa: ANN401
        as_tokens(*args, **{**named, "trusted": True})

    as_tokens = times.timed(AS_TOKENS, whole)
    replace_everywhere((ChatPrompts, "token_ids"), times.timed(AS_TEXT, whole, trusted))


# --- the two processes ------------------------------------------------------------------------------


def serve(args: Sequence[str]) -> None:
    """A gateway: SOCKETS PORT KIND TIMES, the last one empty where nothing is timed."""
    sockets, port, name, file = args
    kind = next(kind for kind in KINDS if kind.name == name)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with tempfile.TemporaryDirectory(prefix="gateway-") as directory, ExitStack() as stack:
        place, path = Path(directory), str(DEMO)
        if kind.is_apart:
            path = str(with_long_template(place / "m"))
        config = relay_gateway.config_of(
            frozenset() if kind.has_key else frozenset({"auth"}), int(port), place
        )
        config = msgspec.structs.replace(
            config, models=(ModelConfig(path=path, name="m"),), admission=AdmissionConfig()
        )
        if file:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
            times = Times()
            own_ns = times.own_ns()
            (time_special_tokens if kind.has_special else time_template)(times)
            stack.enter_context(timing(times, CHECKS))
            threading.Thread(target=tell, args=(times, own_ns, Path(file)), daemon=True).start()
        uvloop.run(relay_gateway._main(sockets.split(","), config, counted=True))


def with_long_template(place: Path) -> Path:
    """The demo model with a template that is longer than what may run in the gateway."""
    shutil.copytree(DEMO, place)
    file = place / "tokenizer_config.json"
    config = json.loads(file.read_text())
    config["chat_template"] += "{#" + "." * sandbox.SOURCE_CHARS_MAX + "#}"
    file.write_text(json.dumps(config))
    return place


def tell(times: Times, own_ns: float, file: Path) -> None:
    """At every SIGUSR1 write what was timed since the last one."""
    while True:
        signal.sigwait({signal.SIGUSR1})
        new = file.with_suffix(".new")
        new.write_text(json.dumps({"own_ns": own_ns, "calls": times.take()}))
        new.rename(file)


def work(socket: str, identity: str) -> None:
    """A worker: it says which identity it has, so that prompt keys are made for it."""
    stand_in_worker.INFO = msgspec.structs.replace(stand_in_worker.INFO, identity=identity)
    uvloop.run(stand_in_worker._main(socket, 0))


# --- measuring --------------------------------------------------------------------------------------

Round = dict[str, float]
"""Microseconds per request, by check."""


def per_request(found: dict[str, list[int]], own_ns: float, requests: int) -> Round:
    """Of a round."""
    result: Round = {}
    for name, calls in found.items():
        if usual := [call for call in calls if call < CALL_NS_MAX]:
            mean_ns = max(0.0, sum(usual) / len(usual) - own_ns)
            result[name] = mean_ns * len(calls) / requests / 1000
    return result


class Pair:
    """A gateway as served, and one that times, each with its worker."""

    def __init__(self, kind: Kind, place: Path, stack: ExitStack) -> None:
        self._kind, self._place = kind, place
        self.file = place / f"{kind.name}.json"
        self._plain = self._start("", stack)
        self._timed = self._start(str(self.file), stack)

    def _start(self, file: str, stack: ExitStack) -> tuple[int, Process]:
        port, script = free_port(), str(Path(__file__).resolve())
        name = f"{self._kind.name.replace(' ', '-')}-{bool(file):d}"
        log, sockets = self._place / f"{name}.log", list[str]()
        for number, identity in enumerate(self._kind.identities):
            sockets.append(str(self._place / f"{name}-{number}.sock"))
            worker = Process(sys.executable, script, "--work", sockets[-1], identity, log=log)
            stack.callback(worker.end)
        served = ("--serve", ",".join(sockets), str(port), self._kind.name, file)
        process = Process(sys.executable, script, *served, log=log)
        stack.callback(process.end)
        return port, process

    def _load(self, port: int, requests: int) -> None:
        file = self._place / "request"
        file.write_bytes(request_bytes(self._kind, port))
        command = (str(self._place / "load"), str(port), str(CONNECTIONS), str(requests), str(file))
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode or json.loads(done.stdout)["errors"]:
            raise RuntimeError(f"{self._kind.name}: {done.stdout}{done.stderr[:500]}")

    def wait(self) -> None:
        """Until both answer."""
        for port, process in (self._plain, self._timed):
            deadline = time.monotonic() + START_S
            while True:
                try:
                    self._load(port, 1)
                    break
                except RuntimeError:
                    if time.monotonic() > deadline or process.child.poll() is not None:
                        raise
                    time.sleep(0.2)
            self._load(port, 20 * CONNECTIONS)
        self._take()

    def round(self, requests: int) -> Round:
        """One burst to each."""
        port, process = self._plain
        before = process.cpu_exact_s()
        self._load(port, requests)
        whole = (process.cpu_exact_s() - before) / requests * 1e6
        self._load(self._timed[0], requests)
        told = self._take()
        return {"whole": whole, **per_request(told["calls"], told["own_ns"], requests)}

    def _take(self) -> dict[str, Any]:
        os.kill(self._timed[1].child.pid, signal.SIGUSR1)
        deadline = time.monotonic() + START_S
        while not self.file.exists():
            assert time.monotonic() < deadline, "the gateway does not tell its times"
            time.sleep(0.01)
        found = json.loads(self.file.read_text())
        self.file.unlink()
        return found


def measure_gateway(rounds: int, requests: int) -> dict[str, list[Round]]:
    """One kind of request after the other: two gateways at a time."""
    results: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="mends-") as directory:
        place = Path(directory)
        build(place)
        for kind in KINDS:
            with ExitStack() as stack:
                pair = Pair(kind, place, stack)
                pair.wait()
                results[kind.name] = [pair.round(requests) for _ in range(rounds)]
            print(f"{kind.name}: done", file=sys.stderr)
    return results


def measure_simulated(rounds: int) -> list[Round]:
    """Per first attempt at twice the knee, each round with a seed of its own."""
    times, found = Times(), list[Round]()
    own_ns = times.own_ns()
    with timing(times, SIMULATED):
        for seed in range(1, rounds + 1):
            played = play(mixed(Knobs(load=2)), seed)
            found.append(per_request(times.take(), own_ns, len(played.records)))
    return found


def spread(values: Sequence[float], digits: int) -> str:
    return f"{median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def show(results: dict[str, list[Round]], simulated: list[Round]) -> None:
    """The tables, in Markdown."""
    print("\n| request | check | us per request | of the whole |\n|---|---|---|---|")
    for kind, rounds in results.items():
        whole = [each["whole"] for each in rounds]
        print(f"| {kind} | the whole request's gateway CPU | {spread(whole, 0)} | |")
        for name in (*CHECKS, CHARGED, JINJA, AS_TEXT, AS_TOKENS):
            times = [each[name] for each in rounds if name in each]
            if times:
                print(f"| | {name} | {spread(times, 1)} | {median(times) / median(whole):.1%} |")
    whole_us = median(each["whole"] for each in results["question"])
    print("\n| at twice the knee, simulated | us per request | of a question's whole |\n|---|---|---|")
    for name in SIMULATED:
        times = [each[name] for each in simulated]
        print(f"| {name} | {spread(times, 1)} | {median(times) / whole_us:.1%} |")


def main() -> None:
    parser = command_line(__doc__, rounds=7)
    parser.add_argument("--requests", type=int, default=300)
    parser.add_argument("--show", type=Path, metavar="FILE", help="the tables of a run again")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        serve(args.serve)
        return
    if args.work:
        with suppress(KeyboardInterrupt):
            work(*args.work)
        return
    if args.show:
        told = json.loads(args.show.read_text())
        show(told["gateway_us"], told["simulated_us"])
        return
    results, simulated = measure_gateway(args.rounds, args.requests), measure_simulated(args.rounds)
    show(results, simulated)
    write_result(args.json, {"requests": args.requests, "gateway_us": results, "simulated_us": simulated})


if __name__ == "__main__":
    main()
