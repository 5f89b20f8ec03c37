"""The event loop's cost of the usage ledger for each request, beside a bare loop of `os.write`.

    python bench/ledger.py [--requests 20000] [--directory DIR] [--out FILE]

CPU time of the loop's own thread for open + slice + close, with a flush for each request (nothing else
happens in its iteration) and one for 32 (as many as a busy gateway handles in one). The baseline writes the
very same number of bytes to a file with one `os.write` for each request. "all threads" has the syncing and
the delivery to SQLite as well.

"SQLite alone" is the obvious library in the journal's place: the same three facts of each request as rows of
a database in WAL mode with `synchronous = NORMAL`, one transaction for each flush, on the loop's thread; the
end is a row of the table that readers ask, so that nothing has to be delivered.
"""

import asyncio
import os
import sqlite3
import tempfile
import time
from pathlib import Path
from statistics import median

import msgspec
from harness import command_line, write_result

from penstock.clock import SystemClock, sleep
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import LogConfig
from penstock.policy.flow import Outcome, UsageRecord
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.ledger_segment import Kind, LedgerLimits, Progress, encode, to_frame
from penstock.telemetry.ledger_sink import columns
from penstock.telemetry.log import Log

CLOCK = SystemClock()
ROUNDS = 5


def accepted(number: int) -> UsageRecord:
    return UsageRecord(
        request_id=f"req-0123456789abcdef{number:08x}",
        ended_ns=1_700_000_000_000_000_000 + number,
        tenant="acme",
        tier="pro",
        key_prefix="sk-a1b2c3d4",
        requested_model="penstock-demo",
        served_model="penstock-demo",
        band="default",
        outcome=Outcome.FAILED,
        price_version="2026-11",
    )


def ended(number: int) -> UsageRecord:
    return UsageRecord(
        request_id=f"req-0123456789abcdef{number:08x}",
        ended_ns=1_700_000_000_500_000_000 + number,
        tenant="acme",
        tier="pro",
        key_prefix="sk-a1b2c3d4",
        requested_model="penstock-demo",
        served_model="penstock-demo",
        band="default",
        worker="penstock-demo/0",
        outcome=Outcome.FINISHED,
        finish_reason="stop",
        prompt_tokens=812,
        cached_tokens=768,
        completion_tokens=143,
        attempts=1,
        queue_us=1_500,
        prefill_us=20_000,
        decode_us=900_000,
        total_us=930_000,
        ttft_us=23_000,
        kv_block_us=40_000_000,
        cost_micros=212,
        accelerator_cost_micros=187,
        price_version="2026-11",
    )


def used(number: int) -> Progress:
    return Progress(
        request_id=f"req-0123456789abcdef{number:08x}",
        at_ns=1_700_000_000_100_000_000,
        prompt_tokens=812,
        cached_tokens=768,
        completion_tokens=1,
        cost_micros=130,
        worker="penstock-demo/0",
    )


async def ledger_us(directory: Path, num: int, batch: int, *, deliver: bool) -> tuple[float, float]:
    """(loop's CPU, all threads' CPU) in microseconds per request."""
    deliver_ms = 50 if deliver else 60_000
    config, log = LedgerConfig(directory=str(directory)), Log(LogConfig(level="warning"), CLOCK)
    ledger = Ledger(config, CLOCK, log, limits=LedgerLimits(deliver_ms=deliver_ms))
    await ledger.start()
    facts = [(accepted(i), used(i), ended(i)) for i in range(num)]
    loop_ns = 0
    process_ns = time.process_time_ns()
    for first in range(0, num, batch):
        begun_ns = time.thread_time_ns()
        for record, _, _ in facts[first : first + batch]:
            ledger.open(record)
        ledger.flush()
        for _, progress, record in facts[first : first + batch]:
            ledger.slice(progress)
            ledger.close(record)
        ledger.flush()
        loop_ns += time.thread_time_ns() - begun_ns
        if first % 1024 == 0:
            await sleep(0)
    while deliver and ledger.statistics().pending:
        await sleep(0.01)
    process_ns = time.process_time_ns() - process_ns
    await ledger.stop()
    return loop_ns / num / 1000, process_ns / num / 1000


OPEN = "INSERT INTO live VALUES (?, ?)"
END = "DELETE FROM live WHERE request_id = ?"


def sqlite_us(directory: Path, num: int, batch: int) -> float:
    """CPU of the loop's thread in microseconds per request."""
    path = directory / f"alone-{batch}.db"
    path.unlink(missing_ok=True)
    database = sqlite3.connect(path, isolation_level=None)
    run = database.execute
    run("PRAGMA journal_mode = WAL")
    run("PRAGMA synchronous = NORMAL")
    run("CREATE TABLE live (request_id TEXT PRIMARY KEY, body BLOB) WITHOUT ROWID")
    names = ", ".join(f"{name} {kind}" for name, kind in columns().items())
    run(f"CREATE TABLE usage ({names})")
    insert = f"INSERT INTO usage VALUES ({', '.join('?' * len(columns()))})"
    facts = [(accepted(i), used(i), ended(i)) for i in range(num)]
    begun_ns = time.thread_time_ns()
    for first in range(0, num, batch):
        some = facts[first : first + batch]
        run("BEGIN")
        for record, _, _ in some:
            run(OPEN, (record.request_id, encode(record)))
        run("COMMIT")
        run("BEGIN")
        for _, _, record in some:  # A slice that its end follows is not written: not by the journal either.
            run(END, (record.request_id,))
            run(insert, msgspec.structs.astuple(record))
        run("COMMIT")
    spent_ns = time.thread_time_ns() - begun_ns
    database.close()
    return spent_ns / num / 1000


def bare_us(directory: Path, num: int) -> float:
    """CPU of writing as many bytes with one call for each request."""
    size = sum(
        len(to_frame(kind, encode(body)))
        for kind, body in ((Kind.OPEN, accepted(1)), (Kind.SLICE, used(1)), (Kind.CLOSE, ended(1)))
    )
    data = bytes(size)
    handle = os.open(directory / "bare", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    begun_ns = time.thread_time_ns()
    for _ in range(num):
        os.write(handle, data)
    elapsed_ns = time.thread_time_ns() - begun_ns
    os.close(handle)
    return elapsed_ns / num / 1000


def encode_us(num: int) -> float:
    """CPU of turning the three structs into msgpack, which any ledger would pay."""
    encoder = msgspec.msgpack.Encoder()
    facts = accepted(1), used(1), ended(1)
    begun_ns = time.thread_time_ns()
    for _ in range(num):
        for fact in facts:
            encoder.encode(fact)
    return (time.thread_time_ns() - begun_ns) / num / 1000


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        directory = Path(name)
        rounds: dict[str, list[float]] = {}
        for _ in range(ROUNDS):
            bare = bare_us(directory, args.requests)
            rounds.setdefault("bare os.write", []).append(bare)
            rounds.setdefault("encoding alone", []).append(encode_us(args.requests))
            for batch in (1, 32):
                own, _ = asyncio.run(ledger_us(directory, args.requests, batch, deliver=False))
                rounds.setdefault(f"ledger, flush per {batch}", []).append(own)
                own, process = asyncio.run(ledger_us(directory, args.requests, batch, deliver=True))
                rounds.setdefault(f"  with SQLite behind it, flush per {batch}", []).append(own)
                rounds.setdefault(f"  all threads, flush per {batch}", []).append(process)
                own = sqlite_us(directory, args.requests, batch)
                rounds.setdefault(f"SQLite alone, flush per {batch}", []).append(own)
        base = rounds["bare os.write"]
        for label, values in rounds.items():
            ratios = [value / bare for value, bare in zip(values, base, strict=True)]
            print(
                f"{label:42} {median(values):8.1f} us   {median(ratios):6.2f} x bare "
                f"({min(ratios):.2f} to {max(ratios):.2f})"
            )
        if args.json:
            write_result(args.json, {"requests": args.requests, "us_per_request": rounds})


if __name__ == "__main__":
    main()
