"""What survives kill -9 for bench/sockets/ledger_crash.py, and that it is held against the ledger."""

from pathlib import Path

from bench.sockets import ledger_crash, live_totals
from bench.sockets.live_totals import Life


def record(request_id: str, *, recovered: int = 0, cost: int = 10) -> ledger_crash.Record:
    return ledger_crash.Record("c1", request_id, "finished", recovered, 6, 0, 4, cost)


def test_lives_are_read_as_they_were_last_written(tmp_path: Path) -> None:
    for name in ("0000-7", "0001-9"):
        file = live_totals.LifeFile(tmp_path / f"{name}.life")
        file.write(Life(settling=f"{name}-a"))
        file.write(Life(tokens=10, micros=5))
    live_totals.LifeFile(tmp_path / "0002-9.life")  # Killed before it settled anything.
    assert live_totals.read_lives(tmp_path) == [Life(tokens=10, micros=5)] * 2 + [Life()]


def test_a_write_that_was_cut_off_leaves_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "0000-7.life"
    file = live_totals.LifeFile(path)
    file.write(Life(tokens=10))
    data = bytearray(path.read_bytes())
    other = 1 + (1 - data[0]) * live_totals.COPY_BYTES
    data[other : other + 20] = b'{"tokens":11,"micros'
    path.write_bytes(data)
    assert live_totals.read_lives(tmp_path) == [Life(tokens=10)]


def test_settled_is_the_records_that_were_closed() -> None:
    lives = [Life(tokens=10, micros=10, settling="b"), Life(tokens=10, micros=10, restored_micros=40)]
    records = [record("a"), record("b"), record("c"), record("d", recovered=1)]
    verdict = ledger_crash.Verdict()
    ledger_crash.settle(lives, records, verdict)
    assert not verdict.wrong
    ledger_crash.settle(lives, [*records, record("e")], verdict)
    assert [line.partition(":")[0] for line in verdict.wrong] == [
        "limiters' tokens",
        "budgets' micros",
        "micros that the last budgets began with",
    ]
