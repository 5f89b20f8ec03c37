"""The examples run as they stand, against a server started from the example config."""

import contextlib
import importlib.metadata
import io
import os
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from openai import OpenAI

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
        server.send_signal(signal.SIGINT)  # Behind SIGTERM it would listen on for a lameduck time.
        assert server.wait(PATIENCE_S) == 0


class Ended(NamedTuple):
    """How a script ended: its exit status, and what it wrote last (`SystemExit` with words is status 1)."""

    status: int
    said: str
    error: str


def play(script: Path, environment: dict[str, str], *argv: str) -> Ended:
    """A script, as `python SCRIPT ARGV...` runs it, but in this process: to import `openai` takes seconds."""
    out = io.StringIO()
    before, arguments = dict(os.environ), sys.argv
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [str(script), *argv]
    try:
        with contextlib.redirect_stdout(out):
            runpy.run_path(str(script), run_name="__main__")
    except SystemExit as error:
        words = "" if error.code is None or isinstance(error.code, int) else str(error.code)
        status = error.code if isinstance(error.code, int) else int(bool(words))
        return Ended(status, out.getvalue(), words)
    finally:
        os.environ.clear()
        os.environ.update(before)
        sys.argv = arguments
    return Ended(0, out.getvalue(), "")


def run(name: str, environment: dict[str, str], *argv: str) -> str:
    done = play(EXAMPLES / name, environment, *argv)
    assert done.status == 0, done.error
    return done.said


def test_stream(environment: dict[str, str]) -> None:
    said = run("stream.py", environment, "What is the capital of France?")
    assert "The capital of France is Paris." in said
    assert "prompt tokens" in said


def test_tool_call(environment: dict[str, str]) -> None:
    said = run("tool_call.py", environment)
    assert 'the model calls get_weather({"city": "Paris"})' in said
    assert said.splitlines()[1] == "The weather in Paris is sunny, 19 °C."


def test_typed_answer(environment: dict[str, str]) -> None:
    said = run("typed_answer.py", environment, "Extract name and age as JSON: Anna is 31 years old.")
    assert said == "Person(name='Anna', age=31)\n"


def test_agent_loop(environment: dict[str, str]) -> None:
    said = run("agent_loop.py", environment, "What is the weather in Paris?").splitlines()
    assert said == ['get_weather({"city": "Paris"})', "The weather in Paris is sunny, 19 °C."]


def test_many_at_once(environment: dict[str, str]) -> None:
    said = run("many_at_once.py", environment).splitlines()
    assert len(said) == 51
    assert said[-1].endswith("the same")


def test_both_models_are_there(environment: dict[str, str]) -> None:
    client = OpenAI(base_url=environment["PENSTOCK_URL"], api_key=KEY)
    assert sorted(model.id for model in client.models.list()) == ["penstock-demo", "small"]


def test_the_port_alone_is_enough(environment: dict[str, str]) -> None:
    port = environment["PENSTOCK_URL"].rpartition(":")[2].removesuffix("/v1")
    known = {name: value for name, value in environment.items() if name != "PENSTOCK_URL"}
    said = run("stream.py", {**known, "PENSTOCK_PORT": port}, "What is the capital of France?")
    assert "The capital of France is Paris." in said


@pytest.mark.parametrize("name", ["stream.py", "tool_call.py", "many_at_once.py"])
def test_without_a_server_they_end_in_one_line(name: str) -> None:
    with socket.socket() as taken:  # Bound, but nobody listens.
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
        known = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        done = play(EXAMPLES / name, {**known, "PENSTOCK_PORT": port})
    assert done.status == 1
    (line,) = done.error.splitlines()
    assert f"http://127.0.0.1:{port}/v1: " in line
    assert "make serve" in line


def test_the_readmes_python_works_after_the_commands_above_it(
    environment: dict[str, str], tmp_path: Path
) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text()
    before, _, rest = readme.partition("```python\n")
    code = rest.partition("```")[0]
    assert "pip install -c constraints.txt openai" in before
    constraints = (EXAMPLES.parent / "constraints.txt").read_text()
    assert f"openai=={importlib.metadata.version('openai')}\n" in constraints
    code = code.replace("http://127.0.0.1:8000/v1", environment["PENSTOCK_URL"]).replace("sk-...", KEY)
    script = tmp_path / "readme.py"
    script.write_text(code)
    done = play(script, environment)
    assert (done.status, done.error) == (0, "")
    assert "42" in done.said
