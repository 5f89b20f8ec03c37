"""Clients that others wrote, unchanged, against a `penstock serve` of the demo model: `make test-clients`.

Each is a program in its own environment that fails by itself if an answer is not what it should be.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import Server

HERE = Path(__file__).parent
VENV = Path(os.environ.get("VENV", HERE.parents[1] / ".venv")).absolute()
PATIENCE_S = 240
KEY = "sk-clients-0123456789abcdef"
LLM_MODELS = """
- model_id: demo
  model_name: penstock-demo
  api_base: {url}
  api_key_name: penstock
  supports_schema: true
  supports_tools: true
"""
WEATHER = '''
def get_weather(city: str) -> str:
    """Get the current weather in a city."""
    return '{"temperature": 19, "conditions": "sunny"}'
'''

pytestmark = [pytest.mark.clients, pytest.mark.timeout(2 * PATIENCE_S)]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment of the clients: the server's address and key, where they look for OpenAI's."""
    place = tmp_path_factory.mktemp("clients")
    server = Server(place, "penstock-demo", "--port", "0", PENSTOCK_API_KEY=KEY)
    try:
        server.wait_ready()
        (place / "extra-openai-models.yaml").write_text(LLM_MODELS.format(url=server.url))
        (place / "keys.json").write_text(json.dumps({"penstock": KEY}))
        yield {
            **os.environ,
            "OPENAI_BASE_URL": server.url,
            "OPENAI_API_KEY": KEY,
            "LLM_USER_PATH": str(place),
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "LANGSMITH_TRACING": "false",
        }
    finally:
        server.close()


def run(command: list[str | Path], environment: dict[str, str], where: Path = HERE) -> str:
    done = subprocess.run(
        command, env=environment, cwd=where, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "client",
    [
        "openai_python", "openai_checks", "instructor_client", "pydantic_ai_client", "langchain_client",
        "smolagents_client", "litellm_client", "agents_client",
    ],
)  # fmt: skip
def test_python(environment: dict[str, str], client: str) -> None:
    run([VENV / "clients" / "bin" / "python", f"{client}.py"], environment)


@pytest.mark.parametrize("client", ["openai_node", "ai_sdk"])
def test_node(environment: dict[str, str], client: str) -> None:
    where = VENV / "clients-node"
    if not where.exists():
        pytest.skip("there is no Node (Debian: apt-get install nodejs npm)")
    for file in (HERE / "node").glob("*.mjs"):  # Node looks for packages beside a program.
        shutil.copy(file, where)
    run(["node", where / f"{client}.mjs"], environment, where)


def test_the_llm_command(environment: dict[str, str]) -> None:
    llm = [VENV / "clients" / "bin" / "llm", "-m", "demo", "--no-stream"]
    asked = "Extract name and age as JSON: Anna is 31 years old and lives in Paris."
    said = run([*llm, "--schema", "name, age int", asked], environment)
    assert json.loads(said) == {"name": "Anna", "age": 31}
    tools = ["--functions", WEATHER]
    said = run([*llm, *tools, "What is the weather in Paris?"], environment)
    assert "sunny" in said
