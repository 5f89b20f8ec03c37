import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_endpoint import Script, StandIn

from penstock.cli.main import main

Scripted = Callable[[Script], tuple[str, StandIn]]


def test_levels_table_and_report(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    url, server = scripted(Script())
    path = tmp_path / "out.json"
    argv = ["bench", "--url", url, "--concurrency", "1,3", "--requests", "6", "--prompt-tokens", "50"]
    assert main([*argv, "--output-tokens", "7", "--seed", "1", "--json", str(path)]) == 0
    shown = capsys.readouterr()
    promises = "Goodput: TTFT within 500 ms and TPOT within 50 ms"
    for word in ("scripted at", "c=1", "c=3", promises, "TTFT", "TPOT", "ITL", "end to end", "p99"):
        assert word in shown.out
    assert shown.err.splitlines()[0].startswith("c=1: 6 ok, 0 failed in ")
    report = json.loads(path.read_text())
    assert (report["schema"], report["model"], report["settings"]["seed"]) == (
        "penstock.bench/1",
        "scripted",
        1,
    )
    assert [level["requests_ok"] for level in report["levels"]] == [6, 6]
    assert report["levels"][0]["output_tokens"] == 42
    assert report["levels"][0]["prompt_tokens"] == 6 * 50  # The probes found the template's four tokens.
    assert report["settings"]["ttft_promise_ms"] == 500
    assert set(report["environment"]) >= {"penstock", "python", "packages", "cpu", "cpus_usable"}
    prompts = [request["messages"][0]["content"] for request in server.requests]
    assert len(set(prompts)) == len(prompts) == 14  # Two probes; no prompt twice.


def test_goodput_by_ones_own_promises(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = scripted(Script(first_s=0.06))
    argv = ["bench", "--url", url, "--concurrency", "1", "--requests", "2", "--seed", "1"]
    assert main([*argv, "--ttft-ms", "50", "--tpot-ms", "0", "--json", "-"]) == 0
    shown = capsys.readouterr()
    (level,) = json.loads(shown.out)["levels"]
    assert (level["requests_ok"], level["requests_good"], level["goodput_requests_per_s"]) == (2, 0, 0)
    (title,) = (line for line in shown.err.splitlines() if "Goodput" in line)
    assert title.strip() == "Goodput: TTFT within 50 ms"
    assert main([*argv, "--ttft-ms", "60000", "--tpot-ms", "60000", "--json", "-"]) == 0
    (level,) = json.loads(capsys.readouterr().out)["levels"]
    assert level["requests_good"] == 2


def test_the_same_seed_sends_the_same(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    url, server = scripted(Script())
    argv = ["bench", "--url", url, "--rate", "500", "--requests", "5", "--seed", "3"]
    assert main(argv) == main(argv) == 0
    # Open requests may overtake each other on the way; what is sent is the same.
    first, second = (sorted(map(str, half)) for half in (server.requests[:7], server.requests[7:]))
    assert first == second


def test_a_dataset(scripted: Scripted, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text('{"prompt": "one"}\n{"prompt": "two", "max_tokens": 2}\n')
    url, server = scripted(Script())
    argv = [
        "bench",
        "--url",
        url,
        "--concurrency",
        "1",
        "--requests",
        "3",
        "--dataset",
        str(path),
        "--no-ignore-eos",
    ]
    assert main(argv) == 0
    sent = [(request["messages"][0]["content"], request["max_tokens"]) for request in server.requests[1:]]
    assert sent == [("one", 64), ("two", 2), ("one", 64)]
    assert "ignore_eos" not in server.requests[1]


def test_json_on_standard_output(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = scripted(Script())
    assert main(["bench", "--url", url, "--concurrency", "1", "--requests", "2", "--json", "-"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["levels"][0]["name"] == "c=1"
    assert "TTFT" in shown.err


@pytest.mark.parametrize(
    ("script", "argv", "code", "complaint"),
    [
        (Script(key="x"), (), 1, "give the server's key"),
        (Script(refuse_status=400, refuse_message="unknown field ignore_eos"), (), 1, "try --no-ignore-eos"),
        (Script(usage=False), (), 1, "use --dataset"),
        (Script(), ("--shared-prefix", "128"), 2, "must be smaller than --prompt-tokens"),
        (Script(), ("--json", "/no/such/place"), 2, "there is no directory"),
        (Script(), ("--dataset", "/no/such/file"), 2, "No such file"),
        (Script(), ("--url", "nonsense"), 2, "not an http or https address"),
    ],
)
def test_what_cannot_be_measured(
    scripted: Scripted,
    capsys: pytest.CaptureFixture[str],
    script: Script,
    argv: tuple[str, ...],
    code: int,
    complaint: str,
) -> None:
    url, _ = scripted(script)
    assert main(["bench", "--url", url, *argv]) == code
    assert complaint in capsys.readouterr().err


def test_it_fails_when_every_request_does(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    url, _ = scripted(Script(cut_after=1))
    assert main(["bench", "--url", url, "--concurrency", "2", "--requests", "2"]) == 1
    assert "2 failed: the server closed the connection" in capsys.readouterr().out


def test_ctrl_c_shows_what_was_measured(scripted: Scripted, tmp_path: Path) -> None:
    url, server = scripted(Script(words=("x",), first_s=0.01))
    path = tmp_path / "out.json"
    argv = ["bench", "--url", url, "--concurrency", "2", "--duration", "600", "--json", str(path)]
    process = subprocess.Popen([sys.executable, "-m", "penstock", *argv], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    while len(server.requests) < 10:
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    shown, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "TTFT" in shown
    (level,) = json.loads(path.read_text())["levels"]
    assert level["interrupted"] is True
    assert level["requests_ok"] > 0
