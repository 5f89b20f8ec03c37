"""Real processes under `penstock bench` while their fleet changes: failed requests, and how long it took.

    python -m bench.sockets.fleet_changes [scale] [versions] [cells] [--json FILE]

    scale       one worker becomes three and one again, by order, under load
    versions    a faster version is promoted by itself, then a slower one is taken back by itself
    cells       one of three cells, each of a gateway and two workers, is killed with all its processes while
                it computes for another one

Everything is the demo models on this machine, started as a user starts it; the load is `penstock bench`, and
orders are given by `penstock scale` and `penstock rollout`. Fails if a request failed. A FILE that is there
is added to.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from bench.harness import REPOSITORY, command_line, extend_result
from bench.process import Served, family, free_port
from bench.sockets.rollout_noise import ADMIN

KEY, CELL_KEY = f"{ADMIN}0", "the-key-of-all-cells"
PATIENCE_S = 150.0
ENGINE = "threads: 1, dtype: float32, kv_memory_bytes: 33554432, host_kv_memory_bytes: 0"
AUTH = f"auth: {{admin_keys: [{ADMIN}], keys: [{KEY}]}}\n"
# Requests wait here and are not refused: every one of them is to be answered.
PATIENT = "admission: {ttft_target_ms: 0, tpot_target_ms: 0}\n"


def until(happened: Callable[[], object], what: str) -> float:
    """Seconds until then.

    Raises:
        TimeoutError: it has not happened.
    """
    began = time.monotonic()
    while not happened():
        if time.monotonic() > began + PATIENCE_S:
            raise TimeoutError(what)
        time.sleep(0.05)
    return round(time.monotonic() - began, 2)


class Load:
    """`penstock bench` at a server, for as long as its block lasts at most."""

    def __init__(self, server: Served, place: Path, *, callers: int, seconds: float) -> None:
        self._report = place / f"bench-{time.monotonic_ns()}.json"
        command = [
            sys.executable, "-m", "penstock", "bench", "--url", f"http://127.0.0.1:{server.port}/v1",
            "--key", KEY, "--model", "river", "--concurrency", str(callers), "--duration", str(seconds),
            "--output-tokens", "48", "--prompt-tokens", "64", "--json", str(self._report),
        ]  # fmt: skip
        self._child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self._child:  # Which closes its pipe and waits.
            self._child.kill()

    @property
    def is_over(self) -> bool:
        return self._child.poll() is not None

    def ended(self) -> dict[str, Any]:
        """The figures of the whole load.

        Raises:
            RuntimeError: it could not be put on the server, or requests failed.
        """
        said, _ = self._child.communicate()
        if self._child.returncode:
            raise RuntimeError(said)
        (level,) = json.loads(self._report.read_bytes())["levels"]
        if level["requests_failed"]:
            raise RuntimeError(f"{level['requests_failed']} requests failed: {said}")
        kept = ("concurrency", "duration_s", "requests_ok", "requests_failed", "requests_per_s")
        return {name: round(level[name], 2) for name in kept}


def admin(server: Served, path: str) -> Any:  # noqa: ANN401
    status, body = server.ask("GET", path, headers={"Authorization": f"Bearer {ADMIN}"})
    assert status == 200, body
    return json.loads(body)


def command(server: Served, *words: str) -> None:
    """An operator's order."""
    flags = ("--url", f"http://127.0.0.1:{server.port}", "--key", ADMIN)
    subprocess.run([sys.executable, "-m", "penstock", *words, *flags], check=True)


def scale(place: Path) -> dict[str, Any]:
    server = Served(
        place,
        f"models:\n- {{path: penstock-demo-mini, name: river, scale: {{max: 3, min: 1, in_after_s: 2}},"
        f" engine: {{{ENGINE}}}}}\n{AUTH}{PATIENT}",
    )
    try:

        def ready() -> int:
            return admin(server, "/scale?model=river")["ready"]

        with Load(server, place, callers=12, seconds=45) as load:
            command(server, "scale", "river", "--to", "3", "--for", "10m")
            out_s = until(lambda: ready() == 3, "three workers")
            command(server, "scale", "river", "--to", "1", "--for", "10m")
            in_s = until(lambda: len(admin(server, "/admin/workers")["workers"]) == 1, "one worker again")
            assert not load.is_over, "the load goes on"
            return {
                "seconds_until_three_are_ready": out_s, "seconds_until_two_have_left": in_s,
                "load": load.ended(),
            }  # fmt: skip
    finally:
        server.end()


def versions(place: Path) -> dict[str, Any]:
    paths = ("penstock-demo", "penstock-demo-mini", "penstock-demo")
    models = "".join(
        f"- {{path: {path}, name: river, version: {number}, engine: {{{ENGINE}}}}}\n"
        for number, path in enumerate(paths, 1)
    )
    server = Served(place, f"models:\n{models}{AUTH}{PATIENT}")
    try:
        return {
            words: tried(server, place, version, state)
            for version, state, words in (
                (2, "promoted", "a faster version"), (3, "rolled_back", "a slower version after it"),
            )
        }  # fmt: skip
    finally:
        server.end()


def tried(server: Served, place: Path, version: int, expected: str) -> dict[str, Any]:
    """One rollout, from its order to its end."""

    def latest() -> dict[str, Any]:
        return admin(server, "/admin/rollouts?model=river")["rollouts"][0]

    order = ["start", f"river@{version}", "--steps", "50", "--requests", "30", "--warm-up", "5"]
    with Load(server, place, callers=4, seconds=75) as load:
        command(server, "rollout", *order, "--step-minutes", "0.1", "--promote")
        try:
            took_s = until(lambda: latest()["state"] != "running", "the rollout ends")
        except TimeoutError:
            raise RuntimeError(latest()) from None
        found, figures = latest(), load.ended()
    if found["state"] != expected:
        raise RuntimeError(f"{found['state']}: {found['why']}")
    return {"state": found["state"], "why": found["why"], "seconds": took_s, "load": figures}


@contextlib.contextmanager
def three_cells(place: Path) -> Iterator[dict[str, Served]]:
    text = (REPOSITORY / "examples/cells/cells.yaml").read_text()
    for port in ("7101", "7102", "7103"):
        text = text.replace(port, str(free_port()))
    servers: dict[str, Served] = {}
    try:
        for name in ("east", "west", "north"):
            named = {"PENSTOCK_CELL": name, "PENSTOCK_CELL_KEY": CELL_KEY}
            servers[name] = Served(place / name, f"{text}{AUTH}{PATIENT}", **named)
        for each in servers.values():
            until(lambda each=each: len(ready_at(each)) == 4, "two workers and two peers")
        yield servers
    finally:
        for each in servers.values():
            each.end()


def ready_at(server: Served) -> set[str]:
    workers = admin(server, "/admin/workers")["workers"]
    return {each["id"] for each in workers if each["state"] == "ready"}


def cells(place: Path) -> dict[str, Any]:
    with three_cells(place) as servers:
        east, north = servers["east"], servers["north"]

        def num_guests() -> int:
            running = admin(east, "/admin/requests")["requests"]
            return sum(each["worker"] == "cell:north/river" for each in running)

        with Load(east, place, callers=16, seconds=30) as load:
            until(lambda: num_guests() >= 2, "north helps east")
            for pid in family(north.child.pid):
                os.kill(pid, signal.SIGKILL)
            missed_s = until(lambda: "cell:north/river" not in ready_at(east), "north is missed")
            assert not load.is_over, "the load goes on"
            return {"seconds_until_it_is_missed": missed_s, "load": load.ended()}


PARTS = {"scale": scale, "versions": versions, "cells": cells}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (default: all)")
    args = parser.parse_args()
    if unknown := set(args.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}")
    for name in args.parts or PARTS:
        with tempfile.TemporaryDirectory(prefix=f"penstock-{name}-") as place:
            found = PARTS[name](Path(place))
        print(name, json.dumps(found), flush=True)
        extend_result(args.json, {name: found})


if __name__ == "__main__":
    main()
