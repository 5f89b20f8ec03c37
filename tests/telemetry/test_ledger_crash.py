"""Kill -9: a process that writes to the ledger dies at random points, again and again, and nothing is lost or
doubled.
"""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import ledger_writer
import pytest

from penstock import rng
from penstock.clock import SystemClock
from penstock.config.ledger import LedgerConfig
from penstock.config.tree import LogConfig
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.log import Log

NUM_REQUESTS = 2_000
KILLS = 4
DOUBLES = Path(ledger_writer.__file__).parent
ROOT = DOUBLES.parents[1]


def start(directory: Path, recorder: Path, first: int, seed: int) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join([str(ROOT), str(DOUBLES)])
    argv = [
        sys.executable,
        ledger_writer.__file__,
        str(directory),
        str(recorder),
        str(first),
        str(NUM_REQUESTS),
        str(seed),
    ]
    return subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": paths})


def promises(recorder: Path) -> list[tuple[str, str, int]]:
    """What was promised, in order; the last line may be torn."""
    if not recorder.exists():
        return []
    lines = recorder.read_bytes().decode().split("\n")[:-1]
    return [(kind, name, int(amount)) for kind, name, amount in (line.split() for line in lines)]


def next_request(recorder: Path) -> int:
    return max((int(name[1:]) + 1 for kind, name, _ in promises(recorder) if kind == "begin"), default=0)


def run_with_kills(directory: Path, recorder: Path, seed: int) -> int:
    """How often it was killed before it came to its end."""
    random, killed = rng.stream(seed, "kills"), 0
    while True:
        if recorder.exists() and not recorder.read_bytes().endswith(b"\n"):
            with recorder.open("ab") as file:
                file.write(b"\n")
        first = next_request(recorder)
        process = start(directory, recorder, first, random.randint(0, 2**31))
        if killed == KILLS:
            assert process.wait(60) == 0
            return killed
        goal = first + random.randint(1, 2 * (NUM_REQUESTS - first) // (KILLS - killed + 1) + 1)
        deadline = time.monotonic() + 60
        while next_request(recorder) < goal and process.poll() is None:
            assert time.monotonic() < deadline
            time.sleep(random.random() * 0.02)
        process.send_signal(signal.SIGKILL)
        process.wait(60)
        killed += 1


async def recover(directory: Path) -> int:
    """Start and stop a ledger, as the next process does; what all processes spent in the month."""
    clock = SystemClock()
    ledger = Ledger(LedgerConfig(directory=str(directory)), clock, Log(LogConfig(level="error"), clock))
    await ledger.start()
    spent = await ledger.spent()
    await ledger.stop()
    return sum(each.month_micros for each in spent)


@pytest.mark.parametrize("seed", [1])
def test_killed_at_random_points_every_accepted_request_has_exactly_one_record(
    tmp_path: Path, seed: int
) -> None:
    directory, recorder = tmp_path / "ledger", tmp_path / "witness"
    assert run_with_kills(directory, recorder, seed) == KILLS
    spent = asyncio.run(recover(directory))
    assert ledger_segment.instance_directories(directory) == []
    connection = sqlite3.connect(ledger_segment.database_path(directory))
    rows = connection.execute(
        "SELECT request_id, recovered, completion_tokens, cost_micros FROM usage"
    ).fetchall()
    connection.close()
    records = {name: (bool(recovered), tokens, cost) for name, recovered, tokens, cost in rows}
    assert len(records) == len(rows)

    reported = promises(recorder)
    begun = {name for kind, name, _ in reported if kind == "begin"}
    accepted = {name for kind, name, _ in reported if kind == "open"}
    ended = {name: tokens for kind, name, tokens in reported if kind == "close"}
    reached = {name: tokens for kind, name, tokens in reported if kind in ("open", "slice")}
    tried = {name: tokens for kind, name, tokens in reported if kind == "begin"}
    assert len(begun) == NUM_REQUESTS
    assert accepted <= records.keys() <= begun
    for name, (recovered, tokens, cost) in records.items():
        assert cost == 10 * tokens
        if name in ended:
            assert (recovered, tokens) == (False, ended[name])
        else:  # It was cut off: what was promised is there, and nothing that it never came to.
            assert reached.get(name, 0) <= tokens <= tried[name]
    assert any(recovered for recovered, _, _ in records.values())
    # What is settled is what the ledger has: every process began with it, and the last one ended with it.
    in_ledger = sum(cost for _, _, cost in records.values())
    assert spent == in_ledger
    assert [amount for kind, _, amount in reported if kind == "spent"][-1] == in_ledger
