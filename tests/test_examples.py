"""The examples run as they stand, against a server started from the example config."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
KEY = "sk-for-the-examples"
PATIENCE_S = 90.0

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    out = tmp_path_factory.mktemp("serve") / "out"
    known = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    command = [
        sys.executable,
        "-m",
        "penstock",
        "serve",
        "-c",
        str(EXAMPLES / "penstock.yaml"),
        "--port",
        "0",
    ]
    with out.open("w") as stream:
        server = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env={**known, "PENSTOCK_API_KEY": KEY}
        )
    try:
        deadline = time.monotonic() + PATIENCE_S
        while "Ctrl-C drains" not in out.read_text():
            assert server.poll() is None, out.read_text()
            assert time.monotonic() < deadline, out.read_text()
            time.sleep(0.02)
        found = re.search(r"API +(http://\S+)", out.read_text())
        assert found
        yield {**known, "PENSTOCK_URL": found[1], "PENSTOCK_API_KEY": KEY}
    finally:
        server.terminate()
        assert server.wait(PATIENCE_S) == 0


def run(name: str, environment: dict[str, str], *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *argv],
        env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_stream(environment: dict[str, str]) -> None:
    said = run("stream.py", environment, "What is the capital of France?")
    assert "The capital of France is Paris." in said
    assert "prompt tokens" in said


def test_tool_call(environment: dict[str, str]) -> None:
    said = run("tool_call.py", environment)
    assert 'the model calls get_weather({"city": "Paris"})' in said
    assert said.splitlines()[1] == "The weather in Paris is sunny, 19 °C."


def test_many_at_once(environment: dict[str, str]) -> None:
    said = run("many_at_once.py", environment).splitlines()
    assert len(said) == 51
    assert said[-1].endswith("the same")


def test_both_models_are_there(environment: dict[str, str]) -> None:
    code = "from openai import OpenAI; import os; print(sorted(m.id for m in OpenAI(base_url=os.environ['PENSTOCK_URL']).models.list()))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "OPENAI_API_KEY": KEY}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "['penstock-demo', 'small']", done.stderr
