"""The last worker of a model vanishes while requests wait for it: the fallback model answers them, with a
prompt of its own.
"""

import sqlite3
import threading
from contextlib import closing

import msgspec
import pytest

from penstock.config.ledger import LedgerConfig
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig
from penstock.policy.terms import QueueTerms


@pytest.mark.parametrize("stream", [False, True])
def test_who_waits_is_answered_by_the_fallback_and_whoever_may_not_is_told(kit, tmp_path, stream) -> None:
    config = msgspec.structs.replace(
        kit.make_config(),
        routing=RoutingConfig(models=(ModelRoute(model="tiny", fallback="small"),)),
        queue=QueueTerms(worker_credit=0, no_worker_wait_s=0.5),
        admission=AdmissionConfig(**kit.NO_PROMISES),
        ledger=LedgerConfig(directory=str(tmp_path / "ledger")),
    )
    running = kit.RunningGateway(config, small=True, max_running=1, step_s=0.01)
    found: dict[str, tuple[int, str, bytes]] = {}

    def ask(name: str, *headers: str, **fields: object) -> None:
        body = kit.chat(**{"max_tokens": 5, "stream": stream, **fields})
        raw = kit.Raw(running).send(kit.post("/v1/chat/completions", body, "Connection: close", *headers))
        head, _, text = raw.read_all().partition(b"\r\n\r\n")
        raw.close()
        found[name] = (int(head.split()[1]), head.decode().lower(), text)

    def waiting() -> int:
        model_queue = running.gateway._dispatcher.control.model_queue("tiny")
        return model_queue.queue.num_waiting if model_queue is not None else 0

    asked = [
        ("long", (), {"max_tokens": 400}),
        ("may", (), {}),
        ("never", ("x-penstock-degrade: never",), {}),
    ]
    threads = [
        threading.Thread(target=ask, args=(name, *headers), kwargs=fields) for name, headers, fields in asked
    ]
    threads[0].start()
    running.wait_until(lambda: running.backend.num_streams == 1)
    for thread in threads[1:]:
        thread.start()
    running.wait_until(lambda: waiting() == 2)
    running.call(running.backend.lose_worker)
    for thread in threads:
        thread.join(20)
    status, head, text = found["may"]
    assert status == 200
    assert "x-penstock-model: small" in head
    assert "x-penstock-downgrade: unavailable" in head
    assert b'"model":"small"' in text
    status, head, _ = found["never"]
    assert status == 503
    assert "retry-after" in head
    running.stop()
    with closing(sqlite3.connect(tmp_path / "ledger" / "usage.sqlite")) as ledger:
        rows = ledger.execute(
            "SELECT requested_model, served_model, route_reason, outcome, completion_tokens FROM usage"
        ).fetchall()
    short = [row for row in rows if row[3:] == ("finished", 5)]
    assert short == [("tiny", "small", "unavailable", "finished", 5)]


def test_what_does_not_fit_is_answered_by_a_longer_fallback(kit) -> None:
    config = msgspec.structs.replace(
        kit.make_config(), routing=RoutingConfig(models=(ModelRoute(model="tiny", fallback="small"),))
    )
    running = kit.RunningGateway(config, small=True)
    for name, length in (("tiny", 64), ("small", 1024)):
        running.call(lambda name=name, length=length: shorten(running.backends[name], length))

    def ask(num_chars: int, *headers: str, **fields: object) -> tuple[int, str, bytes]:
        body = kit.chat(
            **{"messages": [{"role": "user", "content": "x" * num_chars}], "max_tokens": 8, **fields}
        )
        raw = kit.Raw(running).send(kit.post("/v1/chat/completions", body, "Connection: close", *headers))
        head, _, text = raw.read_all().partition(b"\r\n\r\n")
        raw.close()
        return int(head.split()[1]), head.decode().lower(), text

    status, head, _ = ask(4)
    assert (status, "x-penstock-downgrade" in head) == (200, False)
    status, head, text = ask(200)
    assert status == 200
    assert "x-penstock-model: small" in head
    assert "x-penstock-requested-model: tiny" in head
    assert "x-penstock-downgrade: context" in head
    assert b'"model":"small"' in text
    assert ask(4, max_tokens=300)[0] == 200, "the answer may be what does not fit"
    status, _, text = ask(200, "x-penstock-degrade: never")
    assert status == 400
    assert b"context_length_exceeded" in text
    status, _, text = ask(2000)
    assert status == 400
    assert b"maximum context length is 64 tokens" in text, "of the model that was asked for"
    running.call(running.backends["small"].lose_worker)
    assert ask(200)[0] == 400
    running.stop()


def shorten(backend, length: int) -> None:
    """Its model has a context of so many tokens."""
    backend.status.info = msgspec.structs.replace(backend.status.info, max_model_len=length)
    backend.on_change()
