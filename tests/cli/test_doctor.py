import json
import resource
import shutil
import socket
import sys
import tomllib
from pathlib import Path

import pytest

from penstock.cli.commands import doctor
from penstock.cli.commands.doctor import CheckState, DoctorCheck
from penstock.cli.commands.probe import TorchFacts
from penstock.cli.main import main
from penstock.engine.native import KernelsUnavailable, NativeLibrary
from penstock.gateway.http.terms import WIRE_LIMITS

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "models" / "penstock-demo-mini"
FACTS = TorchFacts(version="2.13.0", threads=2, bfloat16_speedup=7.0, gpus=(), cuda_build="")


@pytest.fixture(autouse=True)
def quick_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: FACTS)


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--port", "0"]) == 0
    shown = capsys.readouterr().out
    for word in (
        "Python",
        "CPU features",
        "memory",
        "torch",
        "2.13.0, 2 threads",
        "bfloat16",
        "port 0",
        "open files",
    ):
        assert word in shown
    assert "penstock serve can work here" in shown


def test_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["can_serve"] is True
    assert {"name", "state", "detail", "hint"} == set(document["checks"][0])


def test_a_missing_part_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: "installed, but dies with signal 4")
    assert main(["doctor"]) == 1
    shown = capsys.readouterr().out
    assert "FAIL" in shown
    assert "dies with signal 4" in shown
    assert "cannot work here yet" in shown


def test_missing_packages_are_named() -> None:
    check = doctor.check_packages("x", ("rich", "no-such-distribution"), "do this")
    assert check == DoctorCheck("x", CheckState.FAIL, "missing: no-such-distribution", "do this")


def test_native_kernels_tell_what_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        isa = NativeLibrary().isa
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    check = doctor.check_native()
    assert (check.state, check.detail.split(";")[0]) == (CheckState.OK, isa)
    assert "bfloat16" in check.detail
    monkeypatch.setenv("PENSTOCK_NATIVE_ISA", "no-such-set")
    assert doctor.check_native().state is CheckState.NOTE


def test_a_port_in_use_is_a_warning() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        check = doctor.check_port(taken.getsockname()[1])
    assert (check.state, check.detail) == (CheckState.WARN, "in use (perhaps by a running server)")


@pytest.mark.parametrize(
    ("facts", "states"),
    [
        (FACTS, [CheckState.OK, CheckState.OK, CheckState.NOTE]),
        (
            TorchFacts(version="1", threads=1, bfloat16_speedup=0.3, gpus=("H200",), cuda_build="13"),
            [CheckState.OK, CheckState.NOTE, CheckState.OK],
        ),
    ],
)
def test_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, facts: TorchFacts, states: list[CheckState]
) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: facts)
    assert [check.state for check in doctor.check_torch()] == states


@pytest.mark.parametrize(
    ("code", "complaint"),
    [
        ("import os; os.kill(os.getpid(), 4)", "dies with signal 4"),
        ("raise ImportError('libgomp is missing')", "does not work: ImportError: libgomp is missing"),
        ("print('x')", "the probe's answer cannot be read"),
    ],
)
def test_a_broken_torch_is_survived(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory, code: str, complaint: str
) -> None:
    monkeypatch.undo()
    interpreter = tmp_path_factory.mktemp("bin") / "python"
    interpreter.write_text(f"#!{sys.executable}\n{code}\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    facts = doctor.probe_torch()
    assert isinstance(facts, str)
    assert complaint in facts


@pytest.mark.parametrize(
    ("hard", "state", "detail"),
    [
        (resource.RLIM_INFINITY, CheckState.OK, "no limit"),
        (20_512, CheckState.OK, "20512 are allowed"),
        (20_000, CheckState.WARN, "20000 connections and the server's own files need 20512"),
    ],
)
def test_a_server_may_raise_its_open_files_to_the_hard_limit(
    monkeypatch: pytest.MonkeyPatch, hard: int, state: CheckState, detail: str
) -> None:
    monkeypatch.setattr(doctor.resource, "getrlimit", lambda _: (1024, hard))
    check = doctor.check_open_files(WIRE_LIMITS)
    assert check.state is state
    assert check.detail.endswith(detail)


def test_it_looks_for_the_packages_that_pip_installs_and_for_no_others() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [[line.partition(">=")[0] for line in lines] for lines in
             (project["dependencies"], project["optional-dependencies"]["engine"])]  # fmt: skip
    assert names == [[*doctor.NEEDED], [*doctor.ENGINE, "torch"]]


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers"),
        ({"hidden_size": 10**15}, "hidden_size"),
        ({"model_type": "unheard-of", "architectures": ["UnheardOf"]}, "UnheardOf"),
    ],
)
def test_a_model_with_an_absurd_configuration_is_refused_in_words(
    fields, complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "absurd"
    shutil.copytree(DEMO, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | fields))
    assert main(["doctor", "--json", str(model)]) == 1
    last = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (last["name"], last["state"]) == (f"model {model}", "fail")
    assert complaint in last["detail"]


def test_a_model_that_can_be_loaded_is_described(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json", str(DEMO)]) == 0
    last = json.loads(capsys.readouterr().out)["checks"][-1]
    assert (last["state"], last["detail"]) == ("ok", "5 layers of 192, vocabulary 4096")
