"""Three cells of real processes, each a gateway and two workers: what goes where, what stays, and what is
left when one of them is killed.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import httpx2
import pytest
from free_port import free_port
from served import Server

from penstock.config.checkpoints import resolve
from penstock.kv.hashing import token_bytes
from penstock.protocol.address import NONCE_BYTES, gateway_mac
from penstock.protocol.cells import Guest, OpenCell
from penstock.protocol.worker import (
    Challenge,
    FrameDecoder,
    Loading,
    Output,
    Proof,
    Ready,
    StepOutput,
    Submit,
    ToWorker,
    decode_from_worker,
    encode,
)
from penstock.text.tokenizer import Tokenizer, tokenizer_mark
from penstock.types import RequestId, SamplingParams

pytestmark = [pytest.mark.timeout(300), pytest.mark.cells]

KEY, ADMIN, CELL_KEY = "sk-cells-0123456789abcdef", "admin-0123456789abcdef", "the-key-of-all-cells"
EXAMPLE = Path(__file__).parents[2] / "examples/cells/cells.yaml"
LABELS = ("east", "west", "north")
MODEL = resolve("penstock-demo-mini")

Heard = TypeVar("Heard")


@dataclass(slots=True)
class Answer:
    """What a client saw of one request."""

    status: int
    text: str = ""
    finish: str = ""
    error: str = ""
    cell: str = ""
    migrated: str = ""


class Cells:
    """All of them, in one directory."""

    def __init__(self, place: Path, *, names: tuple[str, ...] = LABELS, processes: int = 1) -> None:
        self.place, self.servers, self.bases = place, dict[str, Server](), dict[str, str]()
        self.streaming: list[str] = []
        """Cells that an answer is coming from now, one entry for each."""
        text = EXAMPLE.read_text()
        self.ports = {name: str(free_port()) for name in LABELS}
        for name, port in zip(LABELS, ("7101", "7102", "7103"), strict=True):
            assert text.count(port) == 1
            text = text.replace(port, self.ports[name])
        # Requests are to wait here, not to be refused, and every answer is to be the same.
        text += "admission: {ttft_target_ms: 0, tpot_target_ms: 0}\n"
        text += f"server: {{lameduck_s: 0, processes: {processes}}}\n"
        (place / "cells.yaml").write_text(text.replace("{threads: 1,", "{threads: 1, dtype: float32,"))
        for name in names:
            (place / name).mkdir()
        with ThreadPoolExecutor(len(names)) as threads:
            list(threads.map(self.start, names))
        seen = 1 + len(names)  # Two workers, and the others.
        for name in names:
            self.until(lambda name=name: len(self.ready(name)) == seen, f"{name} does not see all")

    def ledger(self, name: str) -> Path:
        return self.place / name / "state" / "ledger"

    def start(self, name: str) -> None:
        place = self.place / name
        server = Server(
            place, "-c", str(self.place / "cells.yaml"), "--port", "0", PENSTOCK_CELL=name,
            PENSTOCK_CELL_KEY=CELL_KEY, PENSTOCK_API_KEY=KEY, PENSTOCK_ADMIN_KEY=ADMIN,
            PENSTOCK_STATE_DIR=str(place / "state"),
        )  # fmt: skip
        server.wait_ready()
        self.servers[name], self.bases[name] = server, server.url.removesuffix("/v1")

    def admin(self, name: str, path: str) -> Any:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return httpx2.get(f"{self.bases[name]}/admin/{path}", headers=headers, timeout=30).json()

    def workers(self, name: str) -> dict[str, dict[str, Any]]:
        return {each["id"]: each for each in self.admin(name, "workers")["workers"]}

    def ready(self, name: str) -> set[str]:
        return {key for key, each in self.workers(name).items() if each["state"] == "ready"}

    def until(self, happened: Callable[[], object], what: str, timeout_s: float = 60.0) -> None:
        end = time.monotonic() + timeout_s
        while not happened():
            assert time.monotonic() < end, what
            time.sleep(0.02)

    def ask(self, name: str, prompt: str, *, tokens: int = 32, **headers: str) -> Answer:
        """A stream, from its beginning to its end."""
        body = {
            "model": "river", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True,
            "ignore_eos": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        said = {"authorization": f"Bearer {KEY}"} | {k.replace("_", "-"): v for k, v in headers.items()}
        found = Answer(status=0)
        url = f"{self.bases[name]}/v1/completions"
        with (
            contextlib.suppress(httpx2.TransportError),
            httpx2.stream("POST", url, json=body, headers=said, timeout=120) as response,
        ):
            found.status, found.cell = response.status_code, response.headers.get("x-penstock-cell", "")
            self.streaming.append(found.cell)
            for line in response.iter_lines():
                _read(found, line)
            self.streaming.remove(response.headers.get("x-penstock-cell", ""))
        return found

    def close(self) -> None:
        for server in self.servers.values():
            for worker in server.workers:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)
            server.close()


def _read(found: Answer, line: str) -> None:
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    found.error = event.get("error", {}).get("type", "") or found.error
    for choice in event.get("choices", ()):
        found.text += choice["text"]
        found.finish = choice["finish_reason"] or found.finish
    facts = event.get("penstock") or {}
    found.cell, found.migrated = facts.get("cell", found.cell), facts.get("migrated", found.migrated)


@pytest.fixture(scope="module")
def cells(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cells]:
    made = Cells(tmp_path_factory.mktemp("cells"))
    yield made
    made.close()


def test_peers_are_seen_and_what_they_are_away_is_measured(cells: Cells) -> None:
    west = cells.workers("east")["cell:west/river"]
    assert west["engine"] == "cell"
    assert west["cell"] == "west"
    assert west["identity"] == cells.workers("east")["river-0"]["identity"], "it computes the same"
    cells.until(lambda: cells.workers("east")["cell:west/river"]["rtt_ms"], "no round trip was measured")
    shown = subprocess.run(
        [sys.executable, "-m", "penstock", "top", "--once", "--url", cells.bases["east"], "--key", ADMIN],
        capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "120"},
    ).stdout  # fmt: skip
    assert re.search(r"cell:west/river +cell +ready", shown)
    assert "ms away" in shown
    health = httpx2.get(f"{cells.bases['east']}/health", timeout=30).json()
    assert health["status"] == "ok"


def test_a_request_is_computed_where_it_came_to_while_there_is_room(cells: Cells) -> None:
    answer = cells.ask("east", "The river")
    assert (answer.status, answer.finish, answer.cell) == (200, "length", "")


def test_a_request_that_is_bound_to_a_label_goes_there_and_nowhere_else(cells: Cells) -> None:
    here = cells.ask("east", "The river")
    there = cells.ask("east", "The river", x_penstock_residency="us")
    assert there.cell == "west"
    assert there.text == here.text, "a peer's answer is the same to the token"
    nowhere = cells.ask("east", "The river", x_penstock_residency="mars")
    assert nowhere.status == 400
    # With the cell that it is bound to full, or gone, it waits; others are not asked.
    request = next(each for each in cells.admin("west", "requests")["requests"] if each["model"] == "river")
    assert request["worker"].startswith("river-")


class Peer:
    """Somebody who speaks to a cell's port by hand."""

    def __init__(self, cells: Cells, name: str, key: str) -> None:
        port = int(cells.ports[name])
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        self.frames = FrameDecoder()
        challenge = self.hear(Challenge)
        nonce = bytes(NONCE_BYTES)
        self.say(Proof(nonce, gateway_mac(key.encode(), challenge.nonce, nonce)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, *messages: ToWorker) -> None:
        self.socket.sendall(b"".join(map(encode, messages)))

    def hear(self, kind: type[Heard]) -> Heard:
        """The next message of that kind.

        Raises:
            EOFError: there is none.
        """
        while data := self.socket.recv(1 << 16):
            for body in self.frames.feed(data):
                if isinstance(message := decode_from_worker(body), kind):
                    return message
        raise EOFError


def test_who_has_not_the_key_hears_nothing(cells: Cells) -> None:
    with Peer(cells, "east", "another-key-than-theirs") as stranger:
        stranger.say(OpenCell(cell="west", model="river"))
        with pytest.raises((EOFError, ConnectionResetError)):
            stranger.hear(Ready)


def test_what_has_been_sent_on_goes_no_further_and_nonsense_ends_alone(cells: Cells) -> None:
    with Peer(cells, "east", CELL_KEY) as peer:
        peer.say(OpenCell(cell="west", model="river", tokenizer=tokenizer_mark(Tokenizer.load(MODEL))))
        assert peer.hear(Ready).info.model == "river"
        for number, (prompt, guest, words) in enumerate(
            (
                (token_bytes([1, 2]), Guest(request_id="r", hops=2), "goes no further"),
                (token_bytes([1, 2]), None, "does not say whose it is"),
                (token_bytes([1, 10**6]), Guest(request_id="r"), "some that the model has not"),
                (b"abc", Guest(request_id="r"), "cannot be read"),
            )
        ):
            peer.say(a_submission(f"wrong-{number}", prompt, guest))
            (output,) = peer.hear(StepOutput).outputs
            assert output.finish is not None
            assert words in (output.finish.error or "")
        peer.say(a_submission("right", token_bytes([1, 2]), Guest(request_id="r")))
        found = list[Output]()
        while not found or found[-1].finish is None:
            found += peer.hear(StepOutput).outputs
        assert sum(len(each.token_ids) for each in found) == 4
    with Peer(cells, "east", CELL_KEY) as other:  # It would read other words than were meant.
        other.say(OpenCell(cell="west", model="river", tokenizer="another"))
        assert "another tokenizer" in other.hear(Loading).stage


def a_submission(name: str, prompt: bytes, guest: Guest | None) -> Submit:
    sampling = SamplingParams(max_tokens=4, temperature=0)
    return Submit(request_id=RequestId(name), prompt=prompt, sampling=sampling, guest=guest)


def usage(cells: Cells, *names: str, by: str) -> dict[str, int]:
    directories = [word for name in names for word in ("--directory", str(cells.ledger(name)))]
    reported = subprocess.run(
        [sys.executable, "-m", "penstock", "usage", *directories, "--by", by, "--format", "json"],
        capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    return {row[by]: row["requests"] for row in json.loads(reported)["rows"]}


@dataclass(slots=True)
class Loaded:
    """The answers of a cell whose peer was killed meanwhile."""

    answers: list[tuple[int, Answer]]
    """With the number of the prompt."""
    num_before: int
    """Those that came before the peer was killed."""
    expected: dict[int, str]
    """The texts, by prompt."""

    def check(self) -> None:
        """No request failed, and every text is the one that would have come without load."""
        assert Counter(each.status for _, each in self.answers) == {200: len(self.answers)}
        assert not {each.error for _, each in self.answers} - {""}
        assert all(each.text == self.expected[number] for number, each in self.answers), "to the token"


def kill_under_load(cells: Cells, peer: str, *, streams: int, further: int) -> Loaded:
    """Sixteen clients of east, whose peer is killed with all its processes once it has so many of their
    streams; they go on until `further` answers have come.
    """
    expected = {number: cells.ask("east", f"The river {number}", tokens=150).text for number in range(4)}
    loaded, stop, lock = Loaded([], 0, expected), threading.Event(), threading.Lock()

    def client(number: int) -> None:
        while not stop.is_set():
            answer = cells.ask("east", f"The river {number % 4}", tokens=150)
            with lock:
                loaded.answers.append((number % 4, answer))

    with ThreadPoolExecutor(16) as threads:
        running = [threads.submit(client, number) for number in range(16)]
        try:
            server = cells.servers[peer]
            pids = (server.process.pid, *server.workers)
            cells.until(lambda: cells.streaming.count(peer) >= streams, f"too little went to {peer}", 120.0)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            loaded.num_before = len(loaded.answers)
            cells.until(lambda: f"cell:{peer}/river" not in cells.ready("east"), f"{peer} is not missed")
            num_then = len(loaded.answers)
            cells.until(lambda: len(loaded.answers) > num_then + further, "east answers no more")
        finally:
            stop.set()
        for each in running:
            each.result()
    return loaded


def wait_for_one_bill(cells: Cells, *names: str, requests: int) -> None:
    """Every request is in the ledgers once, without those that the killed cell lost."""
    cells.until(
        lambda: sum(usage(cells, *names, by="tenant").values()) == requests,
        f"{usage(cells, *names, by='tenant')} of {requests}",
    )


def test_a_killed_cell_costs_no_request_and_every_answer_is_the_same(cells: Cells) -> None:
    """North, with its gateway and its workers, is killed under load that east sends there, for it is cheaper
    than west. It runs last: north is gone afterwards.
    """
    before = sum(usage(cells, *LABELS, by="tenant").values())
    loaded = kill_under_load(cells, "north", streams=2, further=40)
    loaded.check()
    assert any(each.migrated == "exact" for _, each in loaded.answers), "streams there went on elsewhere"
    late = loaded.answers[loaded.num_before :]
    assert any(each.cell == "west" for _, each in late), "the other peer has its part"
    wait_for_one_bill(cells, *LABELS, requests=before + len(loaded.expected) + len(loaded.answers))
    assert usage(cells, "west", by="origin")["east"] > 0


def test_cells_of_several_gateway_processes_help_each_other_and_one_is_killed(tmp_path: Path) -> None:
    """Two cells of two processes each, and the one that helps is killed with all it has. Which process of it
    a connection reaches is the kernel's choice.
    """
    pair = Cells(tmp_path, names=("east", "west"), processes=2)
    try:
        loaded = kill_under_load(pair, "west", streams=1, further=20)
        loaded.check()
        assert any(each.cell == "west" for _, each in loaded.answers)
        wait_for_one_bill(pair, "east", "west", requests=len(loaded.expected) + len(loaded.answers))
    finally:
        pair.close()
