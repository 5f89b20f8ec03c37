"""Tables at every width: a column may be missing and a row may stack, but nothing that is shown is cut."""

import io
import re
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from usage_records import T0_NS, closed

from penstock.cli.commands.top import tables, view_of
from penstock.cli.console import Column, Fitted, row
from penstock.cli.main import main
from penstock.clock import ManualClock
from penstock.policy.limits.budget import DAY_NS
from penstock.protocol.fleet import FleetReport, ModelReport, WorkerReport
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_sink import SqliteSink

WORDS = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=30)


def shown(table: object, width: int) -> str:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(table)
    return out.getvalue()


@given(
    st.lists(st.tuples(WORDS, st.integers(0, 10**9 - 1), st.integers(0, 10**6)), min_size=1, max_size=4),
    st.tuples(st.integers(0, 3), st.integers(0, 3)),
    st.integers(12, 90),
)
def test_every_cell_is_whole_or_its_column_is_said_to_be_missing(rows, ranks, width) -> None:
    columns = [
        Column(head="name", right=False),
        Column(head="big", rank=ranks[0]),
        Column(head="small", rank=ranks[1]),
    ]
    text = shown(Fitted(columns, [row(name, f"{a:,}", f"{b:,}") for name, a, b in rows]), width)
    missing = re.findall(r"\w+", re.sub(r"\s+", " ", text).partition("(no room for: ")[2])
    folded = re.sub(r"\s+", "", text)  # A name that is wider than the terminal goes on in its next line.
    for name, big, small in rows:
        assert name in folded
        assert ("big" in missing) != (f"{big:,}" in text) or "big" in missing
        assert ("small" in missing) != (f"{small:,}" in text) or "small" in missing
    assert "…" not in text
    for line in text.splitlines():
        assert len(line.rstrip()) <= width


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    place = tmp_path / "ledger"
    place.mkdir()
    sink = SqliteSink(ledger_segment.database_path(place), ManualClock())
    sink.write(
        [
            closed(
                str(n),
                tenant="key-17524415",
                model="penstock-demo",
                ended_ns=T0_NS + n * DAY_NS,
                cost_micros=0,
            )
            for n in range(3)
        ]
    )
    sink.close()
    return place


@pytest.mark.parametrize("columns", ["80", "60", "40"])
def test_usage(
    ledger: Path, columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(["usage", "--directory", str(ledger)]) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= int(columns)
    for day in ("2023-11-14", "2023-11-15", "2023-11-16"):
        assert day in text
    assert text.count("key-17524415") == text.count("penstock-demo") == 3
    assert "…" not in text
    assert "cost" not in text  # Nothing has a price.


@pytest.mark.parametrize("columns", ["80", "50"])
def test_plan(columns: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    argv = ["plan", "--model", "70b", "--rps", "20", "--accelerator", "h100", "--accelerator", "mi300x"]
    assert main([*argv, "--json", "-"]) == 0
    reported = capsys.readouterr()
    document, text = msgspec.json.decode(reported.out), reported.err
    assert "…" not in text
    (option,) = document["plan"]
    assert option["lacks"] == []
    assert f"{option['price_per_hour']:.2f}" in text
    assert "70b bf16 on 4 x h100 *" in text
    (line,) = (line for line in text.splitlines() if line.startswith("* needs "))
    assert "tensor parallelism" in line
    assert "vLLM workers" in line


def test_plan_says_when_our_engine_cannot_run_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "70b", "--accelerator", "h100", "--json", "-"]) == 0
    reported = capsys.readouterr()
    (option,) = msgspec.json.decode(reported.out)["plan"]
    assert option["tp"] > 1
    assert option["lacks"] == ["tensor parallelism (several devices for one replica)"]
    assert re.search(r"cheapest: \d+ replicas of 70b on \d x h100 \*", reported.err)
    assert main(["plan", "--model", "8b", "--accelerator", "h100", "--dtype", "fp8", "--json", "-"]) == 0
    (option,) = msgspec.json.decode(capsys.readouterr().out)["plan"]
    assert "fp8 weights on a GPU" in option["lacks"]


def test_plan_explains_its_columns(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = capsys.readouterr().out
    for column in (
        "placement",
        "rows",
        "step ms",
        "TTFT ms",
        "bound by",
        "tokens/s",
        "replicas",
        "devices",
        "USD/h",
        "USD/1M",
    ):
        assert column in text
    assert "least/1M: the theoretical least on this device" in text
    assert "x least" in text


@pytest.mark.parametrize("width", [80, 60, 40])
def test_top_with_a_worker_that_restarts(width: int) -> None:
    stage = "the worker was killed by SIGKILL; restart 1 in 0.25 s"
    workers = [
        WorkerReport(id="penstock-demo-0", model="penstock-demo", engine="penstock", state="starting",
            stage=stage, restarts=1),
        WorkerReport(
            id="penstock-demo-1", model="penstock-demo", engine="penstock", state="ready", running=12,
            waiting=3, kv_blocks_used=25, kv_blocks_total=100, generated_tokens=12_345_678, age_s=107.0,
        ),
    ]  # fmt: skip
    models = [
        ModelReport(name="penstock-demo", waiting=1234, ready=1, workers=2, ttft_count=0, ttft_sum_s=0.0)
    ]
    text = shown(
        tables(view_of(FleetReport(version="1", workers=workers, models=models), None, 1.0), "here"), width
    )
    lines = [line.rstrip() for line in text.splitlines()]
    assert max(map(len, lines)) <= width
    for name in ("penstock-demo-0", "penstock-demo-1"):
        assert len([line for line in lines if line.startswith(name)]) == 1
    assert "1,234" in text
    assert stage in " ".join(text.split())
