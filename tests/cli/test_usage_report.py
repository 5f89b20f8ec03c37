import csv
import io
import json
import os
from pathlib import Path

import pytest
from pyarrow import parquet
from usage_records import T0_NS, closed, opened, progress

from penstock.cli.main import main
from penstock.clock import NS_PER_S, ManualClock, SystemClock
from penstock.config.ledger import LedgerConfig
from penstock.policy.flow import UsageRecord
from penstock.policy.limits.budget import DAY_NS
from penstock.telemetry import ledger_segment
from penstock.telemetry.ledger_journal import Journal
from penstock.telemetry.ledger_segment import LedgerLimits
from penstock.telemetry.ledger_sink import SqliteSink

DAY_1 = T0_NS  # 2023-11-14 22:13:20 UTC
DAY_2 = T0_NS + DAY_NS


def write(directory: Path, *records: UsageRecord) -> None:
    directory.mkdir(exist_ok=True, parents=True)
    sink = SqliteSink(ledger_segment.database_path(directory), ManualClock())
    sink.write(records)
    sink.close()


@pytest.fixture
def ledger(tmp_path: Path) -> Path:
    write(
        tmp_path / "ledger",
        closed("1", tenant="acme", model="big", ended_ns=DAY_1, cost_micros=1_000_001),
        closed("2", tenant="acme", model="big", ended_ns=DAY_1, cost_micros=2),
        closed("3", tenant="acme", model="small", ended_ns=DAY_2, cost_micros=30),
        closed("4", tenant="zoo", model="small", ended_ns=DAY_2, cost_micros=400),
    )
    return tmp_path / "ledger"


def usage(capsys: pytest.CaptureFixture[str], ledger: Path, *argv: str) -> str:
    assert main(["usage", "--directory", str(ledger), *argv]) == 0
    return capsys.readouterr().out


def test_the_table(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split() for line in usage(capsys, ledger).splitlines()]
    assert lines == [
        ["tenant", "model", "day", "requests", "failed", "prompt", "cached", "completion", "cost"],
        ["acme", "big", "2023-11-14", "2", "0", "40", "32", "14", "1.000003"],
        ["acme", "small", "2023-11-15", "1", "0", "20", "16", "7", "0.000030"],
        ["zoo", "small", "2023-11-15", "1", "0", "20", "16", "7", "0.000400"],
        ["total", "4", "0", "80", "64", "28", "1.000433"],
    ]


def test_groups_and_limits(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def rows(*argv: str) -> list[list[str]]:
        return list(csv.reader(io.StringIO(usage(capsys, ledger, "--format", "csv", *argv))))[1:]

    assert [row[:2] for row in rows("--by", "month")] == [["2023-11", "4"]]
    assert [row[:2] for row in rows("--by", "tenant", "--since", "2023-11-15")] == [
        ["acme", "1"],
        ["zoo", "1"],
    ]
    assert [row[:2] for row in rows("--by", "tenant", "--until", "2023-11-15")] == [["acme", "2"]]
    assert [row[:2] for row in rows("--by", "tenant", "--since", "2023-11-15T22:13:20")] == [
        ["acme", "1"],
        ["zoo", "1"],
    ]
    assert rows("--by", "tenant", "--since", "2023-11-15T22:13:21Z") == []
    assert [row[:2] for row in rows("--by", "day", "--tenant", "zoo")] == [["2023-11-15", "1"]]
    assert [row[:2] for row in rows("--by", "outcome,model", "--model", "big")] == [["finished", "big"]]
    assert [row[0] for row in rows("--by", "")] == ["4"]
    assert rows("--by", "tenant", "--since", "24h") == []


def test_csv_has_exact_money_and_no_formulas(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(ledger, closed("5", tenant="=HYPERLINK(1)", ended_ns=DAY_1))
    text = usage(capsys, ledger, "--format", "csv", "--by", "tenant")
    assert text.splitlines()[0] == (
        "tenant,requests,failed,prompt_tokens,cached_tokens,completion_tokens,cost,accelerator_cost"
    )
    assert text.splitlines()[1].startswith("'=HYPERLINK(1),1,")
    assert text.splitlines()[2] == "acme,3,0,60,48,21,1.000033,0.000000"


def test_json(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(usage(capsys, ledger, "--format", "json", "--by", "tenant"))
    assert [row["tenant"] for row in document["rows"]] == ["acme", "zoo"]
    assert document["total"]["cost_micros"] == 1_000_433
    assert document["total"]["requests"] == 4


def test_parquet(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "usage.parquet"
    usage(capsys, ledger, "--format", "parquet", "-o", str(path))
    table = parquet.read_table(path)
    assert table.column("tenant").to_pylist() == ["acme", "acme", "zoo"]
    assert [str(value) for value in table.column("cost").to_pylist()] == ["1.000003", "0.000030", "0.000400"]
    assert str(table.schema.field("requests").type) == "int64"


def test_parquet_without_pyarrow_says_what_to_install(
    ledger: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    assert main(["usage", "--directory", str(ledger), "--format", "parquet"]) == 2
    assert "penstock[parquet]" in capsys.readouterr().err


def test_a_table_in_a_file(ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert usage(capsys, ledger, "-o", str(tmp_path / "t.txt")) == ""
    assert "1.000433" in (tmp_path / "t.txt").read_text()
    assert main(["usage", "--directory", str(ledger), "-o", str(tmp_path)]) == 1


def test_the_currency_is_the_configurations(
    ledger: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(
        f"ledger: {{directory: {ledger}}}\nprices: {{currency: EUR, models: [{{model: big, input: 1}}]}}\n"
    )
    assert main(["usage", "-c", str(config)]) == 0
    assert "cost (EUR)" in capsys.readouterr().out


def test_no_usage_says_so(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--directory", str(ledger), "--tenant", "nobody", "--since", "2023-01-01"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no usage of tenant 'nobody' since 2023-01-01 00:00 UTC" in captured.err
    assert usage(capsys, ledger, "--format", "csv", "--tenant", "nobody").startswith("tenant,model,day,")


def test_no_ledger_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--directory", str(tmp_path)]) == 1
    assert "there is no ledger here" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "complaint"),
    [
        (["--by", "tenant,moon"], "'moon' is not one of tenant, model, day"),
        (["--by", "day,day"], "names a group twice"),
        (["--since", "yesterday"], "'yesterday' is not a time such as"),
        (["--format", "xml"], "invalid choice"),
    ],
)
def test_wrong_usage(argv: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exited:
        main(["usage", *argv])
    assert exited.value.code == 2
    assert complaint in capsys.readouterr().err


def test_journals_count_too_each_request_once(ledger: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Closed but not delivered; delivered but not removed; cut off by a crash; and running now."""
    limits = LedgerLimits(segment_bytes=256 * 1024)
    claims = [ledger_segment.claim_new(ledger, SystemClock()) for _ in range(2)]
    alive, dead = [
        Journal(
            claim, LedgerConfig(), ManualClock(), lambda what, error: pytest.fail(f"{what}: {error}"), limits
        )
        for claim in claims
    ]
    for name in ("1", "new", "running"):
        alive.open(opened(name, tenant="acme"))
    alive.close(closed("1", cost_micros=1_000_001))
    alive.close(closed("new"))
    dead.open(opened("cut", tenant="acme"))
    dead.slice("cut", lambda: progress("cut", 9, at_ns=DAY_1 + NS_PER_S))
    for journal in (alive, dead):
        journal.flush()
    os.close(claims[1].lock)
    document = json.loads(usage(capsys, ledger, "--format", "json", "--by", "tenant", "--tenant", "acme"))
    assert document["total"]["requests"] == 5
    assert document["total"]["failed"] == 1
    assert document["total"]["cost_micros"] == 1_000_033 + 70 + 90
    assert main(["usage", "--directory", str(ledger)]) == 0
    assert "1 requests are running now" in capsys.readouterr().err
    os.close(claims[0].lock)


def test_where_the_machines_money_went(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "costs").mkdir()
    for day, idle in (("2023-11-14", 30.0), ("2023-11-15", 10.0)):
        sums = {"busy": 60.0, "idle": idle, "reserve": 10.0, "charged": 57.0, "floor": 40.0, "tokens": 2e6}
        path = tmp_path / "costs" / f"{day}-1-2.json"
        path.write_text(json.dumps({"penstock-demo": sums, "other": {"idle": 1234.5}}))
    text = usage(capsys, tmp_path, "--cost", "--by", "model,day", "--model", "penstock-demo")
    assert [line.split() for line in text.splitlines()] == [
        ["model", "day", "bill", "USD", "requests", "idle", "reserve", "per", "1M", "floor"],
        ["penstock-demo", "2023-11-14", "100.00", "57.0%", "30.0%", "10.0%", "50", "20"],
        ["penstock-demo", "2023-11-15", "80.00", "71.2%", "12.5%", "12.5%", "40", "20"],
        ["(no", "room", "for:", "platform,", "times)"],
    ]
    assert max(map(len, text.splitlines())) <= 80
    found = json.loads(usage(capsys, tmp_path, "--cost", "--format", "json", "--since", "2023-11-15"))
    assert found["currency"] == "USD"
    assert [(row["model"], row["bill"], row["over_floor"]) for row in found["rows"]] == [
        ("other", 1234.5, None),
        ("penstock-demo", 80.0, 2.0),
    ]
    rows = list(
        csv.reader(io.StringIO(usage(capsys, tmp_path, "--cost", "--format", "csv", "--by", "month")))
    )
    assert rows[0][:2] == ["month", "bill"]
    assert rows[1][:2] == ["2023-11", "2649.0"]
    assert main(["usage", "--directory", str(tmp_path), "--cost", "--tenant", "acme"]) == 2
    assert "column 'machines'" in capsys.readouterr().err
    (tmp_path / "empty" / "costs").mkdir(parents=True)
    assert usage(capsys, tmp_path / "empty", "--cost") == ""
    assert main(["usage", "--directory", str(tmp_path / "nowhere"), "--cost"]) == 1
    assert "there is no ledger here" in capsys.readouterr().err


def test_costs_are_of_whole_days_and_say_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "costs").mkdir()
    for day in ("2023-11-14", "2023-11-15", "2023-11-16"):
        (tmp_path / "costs" / f"{day}-1-2.json").write_text(json.dumps({"m": {"idle": 1.0}}))
    ask = ["usage", "--directory", str(tmp_path), "--cost", "--by", "day", "--format", "csv"]

    def days(*span: str) -> tuple[list[str], str]:
        assert main([*ask, *span]) == 0
        found = capsys.readouterr()
        return [line.partition(",")[0] for line in found.out.splitlines()[1:]], found.err

    assert days("--since", "2023-11-15", "--until", "2023-11-16") == (["2023-11-15"], "")
    found, said = days("--since", "2023-11-14T23:00", "--until", "2023-11-15T01:00")
    assert found == ["2023-11-14", "2023-11-15"]
    assert "this is all of it from 2023-11-14 to before 2023-11-16" in " ".join(said.split())
    table = tmp_path / "table.txt"
    table.write_text("of yesterday")
    assert main([*ask[:-2], "--since", "2024-01-01", "-o", str(table)]) == 0
    assert "of yesterday" not in table.read_text(), "a file that was asked for is written"
    assert "no cost of machines" in capsys.readouterr().err
