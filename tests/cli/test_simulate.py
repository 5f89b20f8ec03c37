"""`penstock simulate` and `penstock plan`, as they are typed."""

import json
import re
from pathlib import Path

import pytest

from penstock.cli.commands.simulate import report_page
from penstock.cli.main import main

EXAMPLE = Path(__file__).parents[2] / "examples" / "trace.jsonl.gz"
SMALL = ["--set", "seconds=3", "--set", "load=0.4"]


def test_a_scenario_prints_and_writes_its_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, page = tmp_path / "out.json", tmp_path / "page.html"
    assert main(
        ["simulate", "steady", *SMALL, "--set", "workers=1", "--json", str(out), "--html", str(page)]
    ) in (0, 1)
    assert "time to first token" in capsys.readouterr().out
    (entry,) = json.loads(out.read_text())
    assert (entry["schema"], entry["scenario"], entry["seed"]) == ("penstock.simulate/1", "steady", 1)
    assert entry["figures"]["requests"] > 0
    check_page(page.read_text(), out)


def test_two_configurations_are_compared_on_the_same_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    args = [
        "simulate",
        "steady",
        *SMALL,
        "--seeds",
        "2",
        "--json",
        "-",
        "--compare",
        "base",
        "max_running=2,workers=1",
    ]
    assert main(args) == 0
    entries = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert entries["attainment"]["a"] >= entries["attainment"]["b"]


def test_traffic_can_be_written_and_played_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "t.jsonl.gz"
    assert main(["simulate", "conversations", "--set", "seconds=5", "--write-trace", str(trace)]) == 0
    assert main(["simulate", "steady", "--trace", str(trace), "--json", "-"]) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["figures"]["requests"] > 2


def test_the_shipped_trace_plays(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["simulate", "steady", "--trace", str(EXAMPLE), "--set", "seconds=10", "--json", "-"]
    assert main(args) == 0
    (entry,) = json.loads(capsys.readouterr().out)
    assert entry["figures"]["requests"] > 10
    assert entry["figures"]["hit_rate"] > 0.3


@pytest.mark.parametrize(
    ("args", "why"),
    [
        (["simulate"], "--list"),
        (["bench", "--fit", "penstock-demo"], "--fit needs --json"),
        (["simulate", "steadi"], "did you mean steady?"),
        (["simulate", "steady", "--set", "load"], "expected KEY=VALUE"),
        (["simulate", "steady", "--compare", "base", "nothing"], "is no file"),
        (["simulate", "steady", "--trace", "/none"], "cannot be read"),
        (["simulate", "steady", "--html", "/none/x.html"], "there is no directory"),
        (["simulate", "steady", "--step-times", "/none"], "penstock-steps/1"),
        (["plan", "--model", "71b"], "did you mean"),
        (["plan", "--accelerator", "h101"], "did you mean h100?"),
        (["plan", "--price", "h100=cheap"], "expected NAME=X"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(
    args: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(args) == 2
    error = capsys.readouterr().err
    assert why in error
    assert error.count("\n") == 1


def test_plan_prints_and_writes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.json"
    args = ["plan", "--model", "70b:0.4", "--model", "7b:0.6", "--rps", "20", "--accelerator", "a100-80"]
    assert main([*args, "--price", "a100-80=1", "--json", str(out)]) == 0
    assert "cheapest:" in capsys.readouterr().out
    plan = json.loads(out.read_text())["plan"]
    assert [each["model"] for each in plan] == ["70b", "7b"]
    assert all(each["price_per_hour"] == each["devices"] for each in plan)


def test_the_example_shows_its_arithmetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--example"]) == 0
    text = capsys.readouterr().out
    assert "110" in text
    assert "350" in text


def test_the_list_has_every_scenario(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    text = capsys.readouterr().out
    for name in ("spike-20x", "noisy-tenant", "large-tenants", "kv-full"):
        assert name in text


def check_page(page: str, out: Path) -> None:
    """The console's page with the same entries in it, which fetches nothing."""
    assert page.startswith("<!doctype html>")
    data = re.search(r'<script type="application/json" id="report">([^<]*)</script>', page)
    assert json.loads(data[1]) == json.loads(out.read_text())
    assert set(re.findall(r"https?://[\w.-]+", page)) <= {"http://www.w3.org"}, "names of XML"
    assert not re.search(r"<(?:link|img|script[^>]* src)", page)


def test_nothing_in_a_report_ends_the_element_that_it_is_in() -> None:
    page = report_page("<b>", b'["</script><script>alert(1)</script>"]').decode()
    assert page.count("<script") == page.count("</script>") == 2
    assert "<title>&lt;b&gt;</title>" in page
