"""Counts how large and how tangled the package is; docs/design/015-the-house-in-figures.md says what each
figure counts.

    python scripts/house.py                         the figures of this checkout
    python scripts/house.py --root ../old --json f  those of another one, written to a file
    python scripts/house.py --table before.json after.json    two such files as the table of the design page

The way of a request is measured, not read: a gateway process and an engine worker process serve the small
demo model under scripts/house_trace.py while one chat request is streamed.
"""

import argparse
import ast
import collections
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
MODEL, KEY = "penstock-demo-mini", "sk-counting-the-house"
COLUMNS_MAX, FUNCTION_LINES_MAX = 110, 70
IDLE_S, SETTLED_S, PATIENCE_S = 12.0, 1.5, 120.0
NUM_REQUESTS = 3
"""A function that did not run for each of them belongs to a beat, not to a request."""
NUM_STREAMS = 16
"""Streams that are open at once while objects are counted."""
CHECKED = ("penstock", "tests", "bench", "training")
NATIVE = (".cpp", ".h")
COUNT_SETTINGS = """
import json, msgspec, typing
from penstock.config.tree import Config
def is_section(kind):
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)
def parts(kind):
    return [part for each in typing.get_args(kind) for part in [each, *parts(each)]]
seen, todo, num_keys, num_headings = set(), [Config], 0, 0
while todo:
    kind = todo.pop()
    if is_section(kind) and kind not in seen:
        seen.add(kind)
        hints = typing.get_type_hints(kind)
        for name in kind.__struct_fields__:
            todo += [part for part in [hints[name], *parts(hints[name])] if is_section(part)]
            if name in kind.__annotations__:
                num_headings += any(map(is_section, [hints[name], *parts(hints[name])]))
                num_keys += 1
        todo += kind.__bases__
print(json.dumps({"keys": num_keys, "headings": num_headings, "sections": len(seen)}))
"""
ROWS = {
    "files_on_a_requests_way": "Files on a chat request's way, in all",
    "files_in_gateway": "... in the gateway process",
    "files_in_worker": "... in the engine worker process",
    "objects_per_request": "Objects per request in the gateway process",
    "objects_per_request_in_worker": "Objects per request in the engine worker process",
    "settings": "Configuration keys",
    "modules": "Modules",
    "duplicate_class_names": "Public class names used more than once",
    "package_lines": "Lines of the package, kernels included",
    "bench_lines": "Lines of bench/",
    "functions_over_70_lines": "Functions of more than 70 lines",
    "lines_over_110_columns": "Lines of more than 110 columns",
}


def count_sources(root: Path) -> dict[str, object]:
    """The figures that can be counted by reading: modules, lines, names, widths."""
    package = sorted((root / "penstock").rglob("*.py"))
    native = [path for path in (root / "penstock").rglob("*") if path.suffix in NATIVE]
    names: collections.Counter[str] = collections.Counter()
    long_functions = 0
    for path in package:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                names[node.name] += 1
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                long_functions += node.end_lineno - node.lineno >= FUNCTION_LINES_MAX
    return {
        "modules": len(package),
        "duplicate_class_names": sum(count > 1 for count in names.values()),
        "package_lines": sum(len(path.read_text().splitlines()) for path in [*package, *native]),
        "bench_lines": sum(len(path.read_text().splitlines()) for path in (root / "bench").rglob("*.py")),
        "functions_over_70_lines": long_functions,
        "lines_over_110_columns": sum(
            len(line) > COLUMNS_MAX
            for folder in CHECKED
            for path in (root / folder).rglob("*.py")
            for line in path.read_text().splitlines()
        ),
        "names_used_more_than_once": sorted(name for name, count in names.items() if count > 1),
    }


def count_settings(root: Path) -> dict[str, object]:
    """Fields of every struct that the type of the configuration reaches, each where it is declared, without
    the headings: those that hold sections (`server`) or lists of them (`models`).
    """
    found = json.loads(_run(root, "-c", COUNT_SETTINGS))
    return {
        "settings": found["keys"] - found["headings"],
        "config_headings": found["headings"],
        "config_sections": found["sections"],
    }


def trace_request(root: Path) -> dict[str, object]:
    """Serve the small demo model, stream one chat request, and say which files ran for it in which
    process.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text("import house_trace\nhouse_trace.start()\n")
        server = Served(root, folder)
        try:
            server.chat(max_tokens=16)  # The first requests load what is loaded late.
            server.chat(max_tokens=16)
            server.window("idle", SETTLED_S)
            idle = server.window("request-0", IDLE_S)
            requests: list[dict[str, Mapping[str, object]]] = []
            for i in range(NUM_REQUESTS):
                server.chat(max_tokens=16)
                requests.append(server.window(f"request-{i + 1}", SETTLED_S))
            streams = [server.open_stream() for _ in range(NUM_STREAMS)]
            held = server.window("end", 0)
            for stream in streams:
                assert b"[DONE]" in stream.read(), "a stream ended before its objects were counted"
        finally:
            server.stop()
    return {**_ways(idle, requests), **_objects(requests[-1], held)}


class Served:
    """`penstock serve` with the tracer in its processes."""

    def __init__(self, root: Path, folder: Path) -> None:
        """Start it and wait until it is ready."""
        self._folder = folder
        self._port = 0
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join([str(folder), str(HERE), str(root)]),
            "HOUSE_TRACE_FOLDER": str(folder),
            "HOUSE_TRACE_PACKAGE": str(root / "penstock"),
            "PENSTOCK_API_KEY": KEY,
            "XDG_STATE_HOME": str(folder / "state"),
            "TMPDIR": str(folder),
        }
        self._output = (folder / "output").open("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock", "serve", MODEL, "--port", "0", "--threads", "1"],
            cwd=root, env=environment, stdout=self._output, stderr=subprocess.STDOUT,
        )  # fmt: skip
        deadline = time.monotonic() + PATIENCE_S
        while not self._port:
            assert self._process.poll() is None, self._said()
            assert time.monotonic() < deadline, self._said()
            found = re.search(r"http://127\.0\.0\.1:(\d+)/v1", self._said())
            self._port = int(found[1]) if found else 0
            time.sleep(0.1)

    def open_stream(self, **fields: object) -> http.client.HTTPResponse:
        """Begin one streamed chat request and return after its first bytes."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=PATIENCE_S)
        body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": "Count."}]}
        body |= {"max_tokens": 800, "ignore_eos": True, "temperature": 0, **fields}
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()
        response.readline()
        return response

    def chat(self, **fields: object) -> None:
        """One streamed chat request from beginning to end."""
        assert b"[DONE]" in self.open_stream(**fields).read()

    def window(self, name: str, after_s: float) -> dict[str, Mapping[str, object]]:
        """After some time begin the window `name`; what each process recorded in the one before, by role."""
        time.sleep(after_s)
        path = self._folder / "window"
        before = path.read_text() if path.exists() else ""
        path.with_suffix(".part").write_text(name)
        path.with_suffix(".part").rename(path)  # Read while it was written, it would be two windows.
        deadline = time.monotonic() + PATIENCE_S
        found: dict[str, Mapping[str, object]] = {}
        while set(found) != {"gateway", "worker"}:
            assert time.monotonic() < deadline, self._said()
            time.sleep(0.02)
            for report in self._folder.glob(f"*-{before}.json"):
                found[report.name.partition("-")[0]] = json.loads(report.read_text())
        return found

    def stop(self) -> None:
        """End it."""
        self._process.send_signal(signal.SIGINT)
        self._process.wait(PATIENCE_S)
        self._output.close()

    def _said(self) -> str:
        return (self._folder / "output").read_text()


def _ways(
    idle: Mapping[str, Mapping[str, object]], requests: Sequence[Mapping[str, Mapping[str, object]]]
) -> dict[str, object]:
    """Per process the files with a function that ran during each request and not while idle."""
    files = {
        role: sorted(
            {
                each[0]
                for each in set.intersection(*(_functions(request[role]) for request in requests))
                - _functions(idle[role])
            }
        )
        for role in idle
    }
    return {
        "files_on_a_requests_way": len(set().union(*files.values())),
        "files_in_gateway": len(files["gateway"]),
        "files_in_worker": len(files["worker"]),
        "files": files,
    }


def _objects(
    idle: Mapping[str, Mapping[str, object]], held: Mapping[str, Mapping[str, object]]
) -> dict[str, object]:
    """Per process the classes of which each open stream has at least one instance more."""
    classes = {
        role: sorted(
            name
            for name, count in _counts(held[role]).items()
            if count - _counts(idle[role]).get(name, 0) >= NUM_STREAMS
        )
        for role in held
    }
    return {
        "objects_per_request": len(classes["gateway"]),
        "objects_per_request_in_worker": len(classes["worker"]),
        "classes_per_request": classes,
    }


def _functions(report: Mapping[str, object]) -> set[tuple[object, ...]]:
    functions = report["functions"]
    assert isinstance(functions, list)
    return {tuple(each) for each in functions}


def _counts(report: Mapping[str, object]) -> dict[str, int]:
    objects = report["objects"]
    assert isinstance(objects, dict)
    return objects


def _run(root: Path, *arguments: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=root, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout


def _commit(root: Path) -> str:
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def format_table(before: Mapping[str, object], after: Mapping[str, object]) -> str:
    """Two results as a Markdown table."""
    rows = [f"| | {before['commit']} | {after['commit']} |", "|---|---|---|"]
    rows += [f"| {text} | {before[key]:,} | {after[key]:,} |" for key, text in ROWS.items()]
    return "\n".join(rows)


def main(argv: Iterable[str] | None = None) -> None:
    """Print the figures of a checkout."""
    parser = argparse.ArgumentParser(description="Count how large and how tangled the package is.")
    parser.add_argument("--root", type=Path, default=HERE.parent, help="the checkout to count")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the figures and the names behind them"
    )
    parser.add_argument("--no-trace", action="store_true", help="only what can be counted without serving")
    parser.add_argument("--table", type=Path, nargs=2, metavar="FILE", help="print two results as a table")
    arguments = parser.parse_args(None if argv is None else list(argv))
    if arguments.table:
        print(format_table(*(json.loads(path.read_text()) for path in arguments.table)))
        return
    root = arguments.root.resolve()
    figures = {"commit": _commit(root), **count_sources(root), **count_settings(root)}
    if not arguments.no_trace:
        figures |= trace_request(root)
    for key, text in ROWS.items():
        if key in figures:
            print(f"{text:55} {figures[key]:>8,}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
