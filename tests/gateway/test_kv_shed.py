"""A worker says that its KV memory is nearly full: who gives way, through real sockets."""

import json
import sqlite3

import msgspec
import pytest
from tenant_keys import add
from told_script import NEVER_S

from penstock.config.ledger import LedgerConfig
from penstock.config.tenancy import TenantConfig
from penstock.policy.terms import QueueTerms
from penstock.protocol.worker import Stats

BANDS = ("system", "priority", "default", "bulk")
TOTAL = 100


class Streams:
    """Streams of tenants of every band on one worker, which never end by themselves."""

    def __init__(self, kit, start, path) -> None:
        self._kit = kit
        self.directory = path / "ledger"
        self.keys = {band: add(path / "keys", tenant=band).key for band in BANDS}
        config = kit.replace(kit.make_config(), auth={"keys_file": str(path / "keys")})
        config = msgspec.structs.replace(
            config,
            tenants=tuple(TenantConfig(id=band, band=band) for band in BANDS),
            queue=QueueTerms(worker_credit=0),
            ledger=LedgerConfig(directory=str(self.directory)),
        )
        self.running = start(config, step_s=NEVER_S, max_running=4)
        self.open = {}

    def ask(self, band: str, *, max_tokens: int, stream: bool = True, begins: bool = True) -> str:
        """A request that holds 10 KV blocks as soon as it has begun to answer; its name."""
        name = f"{band}-{max_tokens}"
        body = {"model": "tiny", "prompt": name.ljust(155, "x"), "max_tokens": max_tokens, "user": name}
        raw = self.open[name] = self._kit.Raw(self.running)
        accepted, running = self.running.gateway.num_accepted, self.num_alive()
        raw.send(
            self._kit.post(
                "/v1/completions", body | {"stream": stream}, "Connection: close", key=self.keys[band]
            )
        )
        self.running.wait_until(lambda: self.running.gateway.num_accepted > accepted)
        if begins:
            self.running.wait_until(lambda: self.running.backend.num_streams > running)
            self.running.call(self.running.backend._step)
        return name

    def report(self, used: int) -> None:
        """The worker says that so many of its 100 KV blocks are in use."""
        backend = self.running.backend

        def say() -> None:
            backend.status.stats = Stats(
                step=1, running=4, waiting=0, blocks_total=TOTAL, blocks_used=used, blocks_cached=0
            )
            backend.on_change()

        self.running.call(say)

    def rest(self, name: str) -> bytes:
        """All that comes yet of an answer."""
        raw = self.open.pop(name)
        text = raw.read_all()
        raw.close()
        return text

    def num_alive(self) -> int:
        return self.running.call(lambda: self.running.backend.num_streams)

    def wait_alive(self, num: int) -> None:
        self.running.wait_until(lambda: self.running.backend.num_streams == num)

    def rows(self) -> list[tuple]:
        """What the ledger says once all have ended: name, outcome, error and tokens given."""
        self.close()
        self.running.wait_until(lambda: self.running.gateway.num_accepted == 0)
        self.running.stop()
        columns = "user, outcome, error, completion_tokens"
        connection = sqlite3.connect(self.directory / "usage.sqlite")
        rows = connection.execute(f"SELECT {columns} FROM usage ORDER BY ended_ns").fetchall()
        connection.close()
        return rows

    def close(self) -> None:
        for raw in self.open.values():
            raw.close()
        self.open.clear()


@pytest.fixture
def streams(kit, start, tmp_path):
    made = Streams(kit, start, tmp_path)
    yield made
    made.close()


def last_error(text: bytes) -> dict:
    """The error event at a stream's end."""
    events = [line[6:] for line in text.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: ")]
    assert b'"error"' in events[-1], text[-400:]
    return json.loads(events[-1])["error"]


def test_the_lowest_band_gives_way_and_in_it_the_longest_answer(streams) -> None:
    streams.ask("priority", max_tokens=5000)
    streams.ask("default", max_tokens=240)
    long, short = streams.ask("bulk", max_tokens=250), streams.ask("bulk", max_tokens=120)
    streams.report(97)  # At the bound, not over it.
    assert streams.num_alive() == 4
    streams.report(
        98
    )  # Down to 90: 8 blocks, less than what one stream has. Nobody waits, and nothing else happens.
    error = last_error(streams.rest(long))
    assert (error["code"], error["type"]) == ("evicted", "service_unavailable")
    assert "KV memory ran out" in error["message"]
    streams.wait_alive(3)
    streams.report(99)
    assert last_error(streams.rest(short))["code"] == "evicted"
    streams.wait_alive(2)
    streams.report(100)
    assert last_error(streams.rest("default-240"))["code"] == "evicted"
    streams.wait_alive(1)
    streams.report(100)
    streams.report(100)
    assert streams.num_alive() == 1, "the best that is there gives way to nobody"
    rows = streams.rows()
    assert [row[:3] for row in rows] == [
        (long, "evicted", "Evicted"),
        (short, "evicted", "Evicted"),
        ("default-240", "evicted", "Evicted"),
        ("priority-5000", "cancelled", ""),
    ]
    assert all(tokens >= 1 for *_, tokens in rows), "what was given is paid for"


def test_protected_bands_never_give_way_not_even_to_one_another(streams) -> None:
    streams.ask("system", max_tokens=10)
    for max_tokens in (3000, 4000):
        streams.ask("priority", max_tokens=max_tokens)
    streams.report(100)
    streams.report(99)
    assert streams.num_alive() == 3


def test_among_equals_the_engine_decides_until_a_better_one_waits(streams) -> None:
    names = [streams.ask("bulk", max_tokens=max_tokens) for max_tokens in (100, 250, 200, 150)]
    streams.report(100)
    assert streams.num_alive() == 4
    streams.ask("default", max_tokens=5, begins=False)  # The worker has four slots: it waits.
    streams.report(98)
    assert last_error(streams.rest(names[1]))["code"] == "evicted"
    streams.wait_alive(3)
    streams.report(88)
    streams.wait_alive(4)  # With the one that waited.


def test_a_whole_answer_that_gives_way_is_an_error_with_a_time_to_come_back(streams) -> None:
    streams.ask("priority", max_tokens=100)
    whole = streams.ask("bulk", max_tokens=100, stream=False)
    streams.report(98)
    head, _, body = streams.rest(whole).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503")
    assert b"retry-after: " in head.lower()
    assert json.loads(body)["error"]["code"] == "evicted"
