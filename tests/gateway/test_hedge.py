"""A worker that says nothing: its requests are started on another one too, which answers; over real
sockets.
"""

import contextlib
import sqlite3
import threading
from contextlib import closing

import msgspec
from fake_backend import FakeBackend

from penstock.config.ledger import LedgerConfig
from penstock.errors import WorkerUnavailable
from penstock.policy.extras.hedging import HedgeTerms

STUCK_S = 60.0
"""Longer than the test may take."""


@contextlib.contextmanager
def two_workers(kit, tmp_path):
    """A gateway that hedges after 200 ms, before two workers of which one will be slow; its budget was saved
    up.
    """

    class Two(kit.RunningGateway):
        async def make_backends(self):
            return {"tiny": [FakeBackend(self.clock, script=self._recorded, max_running=4) for _ in range(2)]}

    config = msgspec.structs.replace(
        kit.make_config(),
        health=HedgeTerms(hedge_share=0.1, hedge_after_ms=200),
        ledger=LedgerConfig(directory=str(tmp_path / "ledger")),
    )
    running = Two(config)
    try:
        with kit.openai_client(running) as client:
            for _ in range(50):  # Each pays in a tenth of a hedge.
                client.completions.create(model="tiny", prompt="x", max_tokens=1)
        yield running
    finally:
        running.stop()


def hedges(running) -> dict[str, float]:
    lines = running.metrics.render().decode().splitlines()
    found = (line for line in lines if line.startswith("penstock_hedges_total{"))
    return {line.split('outcome="')[1].split('"')[0]: float(line.split()[-1]) for line in found}


def test_whoever_is_at_a_slow_worker_is_answered_by_another_and_billed_once(kit, tmp_path) -> None:
    with two_workers(kit, tmp_path) as running:
        slow, quick = running.backend
        running.call(lambda: setattr(slow, "_step_s", STUCK_S))
        texts: list[str] = []

        def ask() -> None:
            with kit.openai_client(running) as client:
                stream = client.completions.create(
                    model="tiny", prompt="hello", max_tokens=6, seed=1, stream=True, temperature=0
                )
                texts.append("".join(chunk.choices[0].text for chunk in stream if chunk.choices))

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert len(texts) == 4
        assert len(set(texts)) == 1
        running.wait_until(lambda: not slow.num_streams and not quick.num_streams)
        reported = hedges(running)
    assert reported["won"] >= 1
    with closing(sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")) as ledger:
        found = ledger.execute(
            "SELECT attempts, outcome, completion_tokens, worker FROM usage WHERE completion_tokens = 6"
        ).fetchall()
    assert len(found) == 4, "one record each, and the loser's tokens are in none"
    assert {row[1:] for row in found} == {("finished", 6, "tiny-1")}
    assert sum(row[0] == 2 for row in found) == reported["won"]


def test_a_client_that_leaves_during_a_race_leaves_nothing_behind(kit, tmp_path) -> None:
    with two_workers(kit, tmp_path) as running:
        for backend in running.backend:
            running.call(lambda backend=backend: setattr(backend, "_step_s", STUCK_S))
        raw = kit.Raw(running)
        raw.send(
            kit.post("/v1/completions", {"model": "tiny", "prompt": "x", "max_tokens": 3, "stream": True})
        )
        running.wait_until(lambda: all(backend.num_streams == 1 for backend in running.backend))
        raw.close()
        running.wait_until(lambda: not any(backend.num_streams for backend in running.backend))
        running.wait_until(lambda: not len(running.gateway._dispatcher))
        assert hedges(running) == {"ended": 1.0}


def test_if_the_second_worker_refuses_the_first_goes_on(kit, tmp_path) -> None:
    with two_workers(kit, tmp_path) as running:
        first, second = running.backend
        running.call(lambda: setattr(first, "_step_s", 0.6))
        running.call(lambda: setattr(second, "_step_s", 0.6))
        generate = type(first).generate
        started = []

        def once(self, request, sink):
            started.append(self)
            if len(started) == 2:
                raise WorkerUnavailable("not now")
            return generate(self, request, sink)

        for backend in running.backend:
            running.call(lambda backend=backend: setattr(backend, "generate", once.__get__(backend)))
        with kit.openai_client(running) as client:
            answer = client.completions.create(model="tiny", prompt="x", max_tokens=2)
        assert answer.usage.completion_tokens == 2
        assert len(started) == 2
        assert hedges(running) == {"failed": 1.0}
