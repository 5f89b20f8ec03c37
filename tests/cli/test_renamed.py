"""Models under other names than their directories': names are labels, and prompts are found where they are
cached all the same.

One server with two models: one from a hub's cache, where the directory is called by a commit and its files
are links, and one whose workers were started elsewhere under its name, with two types of KV cache.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from served import Server

ROOT = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"
KEY = "a key that both sides have"
PROMPTS, ROUNDS = 24, 3
LONG = 3000
"""Answer tokens that take long enough for a worker to be killed meanwhile."""
DTYPES = ("float32", "float32", "bfloat16")

pytestmark = pytest.mark.timeout(300)


def hub_snapshot(cache: Path) -> Path:
    """The small demo model as the hub's client keeps it: links in the snapshot, contents in `blobs`, named by
    what is in them.
    """
    source = ROOT / "models" / "penstock-demo-mini"
    repository = cache / "models--acme--small-chat"
    blobs, snapshot = repository / "blobs", repository / "snapshots" / COMMIT
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, path in enumerate(sorted(source.iterdir())):
        blob = blobs / f"{number:040x}"
        shutil.copyfile(path, blob)
        (snapshot / path.name).symlink_to(Path("../../blobs") / blob.name)
    return snapshot


class Elsewhere:
    """A `penstock worker` of the other model."""

    def __init__(self, dtype: str, environment: dict[str, str]) -> None:
        self.port = free_port()
        command = [sys.executable, "-m", "penstock", "worker", "penstock-demo-mini", "--name", "acme/tiny"]
        settings = ["--threads", "1", "--dtype", dtype, "--kv-memory", "32MiB"]
        self.process = subprocess.Popen(
            [*command, "--listen", f"tcp:127.0.0.1:{self.port}", *settings],
            env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip

    @property
    def id(self) -> str:
        """As the server calls it."""
        return f"acme/tiny@tcp:127.0.0.1:{self.port}"

    def kill_engine(self) -> None:
        """Its engine, which it starts again."""
        pid = self.process.pid
        (engine,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(engine), signal.SIGKILL)

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(60)


class Fleet:
    """The server, and the workers that were started elsewhere."""

    def __init__(self, server: Server, workers: list[Elsewhere]) -> None:
        self.server, self.workers = server, workers

    def open(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """A request; its answer, to be read."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        return urllib.request.urlopen(
            urllib.request.Request(f"{self.root}{path}", data, headers), timeout=120
        )

    @property
    def root(self) -> str:
        return self.server.url.removesuffix("/v1")

    def complete(self, model: str, prompt: str, **more: Any) -> dict[str, Any]:
        """A whole answer, greedy."""
        body = {"model": model, "prompt": prompt, "temperature": 0, **more}
        with self.open("/v1/completions", body) as response:
            return json.load(response)

    def complete_together(self, model: str, prompts: list[str], **more: Any) -> list[dict[str, Any]]:
        """All at once: a fleet that has nothing else to do may send each to the worker that it knows as the
        fastest, prompts that wait for one another are spread over all.
        """
        with ThreadPoolExecutor(len(prompts)) as threads:
            return list(threads.map(lambda prompt: self.complete(model, prompt, **more), prompts))

    def stream_with_kill(self, model: str, prompt: str, worker: Elsewhere) -> tuple[str, list[str]]:
        """A streamed answer's text and workers; if `worker` computes it, its engine dies soon."""
        body = {"model": model, "prompt": prompt, "temperature": 0, "max_tokens": LONG, "ignore_eos": True}
        text, name = "", ""
        with self.open("/v1/completions", {**body, "stream": True}) as response:
            for number, line in enumerate(line for line in response if line.startswith(b"data: {")):
                chunk = json.loads(line.removeprefix(b"data: "))
                if number == 3:
                    name = chunk["id"]
                    if self.explained(name)["decisions"][0]["worker"] == worker.id:
                        worker.kill_engine()
                text += chunk["choices"][0]["text"] if chunk["choices"] else ""
        return text, [each["worker"] for each in self.explained(name)["decisions"] if each["worker"]]

    def states(self) -> list[str]:
        with self.open("/admin/workers") as response:
            return [worker["state"] for worker in json.load(response)["workers"]]

    def explained(self, answer_id: str) -> dict[str, Any]:
        with self.open(f"/admin/explain/{answer_id}") as response:
            return json.load(response)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    place = tmp_path_factory.mktemp("renamed")
    environment = {
        "PENSTOCK_WORKER_KEY": KEY,
        "PENSTOCK_STATE_DIR": str(place / "state"),
        "XDG_RUNTIME_DIR": str(place),
    }
    with ExitStack() as stack:
        workers = [Elsewhere(dtype, {**os.environ, **environment}) for dtype in DTYPES]
        for worker in workers:
            stack.callback(worker.close)
        at = ", ".join(
            f"{{url: 'tcp:127.0.0.1:{worker.port}', engine: penstock, api_key_env: PENSTOCK_WORKER_KEY}}"
            for worker in workers
        )
        file = place / "fleet.yaml"
        file.write_text(
            "models:\n"
            f"  - path: {hub_snapshot(place / 'hub')}\n"
            "    name: acme/small-chat\n"
            "    replicas: 2\n"
            "    engine: {threads: 1, kv_memory_bytes: 33554432}\n"
            f"  - {{path: penstock-demo-mini, name: acme/tiny, replicas: 0, workers: [{at}]}}\n"
        )
        server = Server(place, "-c", str(file), "--port", "0", "--no-auth", **environment)
        stack.callback(server.close)
        server.wait_ready()
        made = Fleet(server, workers)
        server.until(lambda: made.states() == ["ready"] * 5, "not all workers are ready")
        yield made


def prompts(topic: str) -> list[str]:
    """Of some ten blocks each, different from the first token on."""
    line = f"tells of the {topic}, of those who live there, and of what they have seen of it in {{0}} years. "
    return [f"{number} {line.format(number) * 6}" for number in range(100, 100 + PROMPTS)]


@pytest.mark.parametrize("model", ["acme/small-chat", "acme/tiny"])
def test_a_prompt_that_comes_again_is_cached_where_it_is_sent(fleet: Fleet, model: str) -> None:
    counted, cached = list[int](), list[int]()
    asked = prompts("sea")
    for _ in range(ROUNDS):
        # Backwards every second time: taking turns must not bring a prompt to the same worker by accident.
        asked.reverse()
        for prompt in asked:
            usage = fleet.complete(model, prompt, max_tokens=2)["usage"]
            counted.append((usage["prompt_tokens"] - 1) // 16 * 16)
            cached.append(usage["prompt_tokens_details"]["cached_tokens"])
    assert min(counted) >= 160, "whole blocks"
    assert cached == [0] * PROMPTS + counted[PROMPTS:], "a prompt that comes again is found whole"


def test_the_prompts_of_one_name_are_spread_over_workers_of_several_identities(fleet: Fleet) -> None:
    """Each worker is looked up by its own identity's names: all of them are found to hold prompts."""
    holders: set[str] = set()
    fleet.complete_together("acme/tiny", prompts("moor"), max_tokens=2)
    for prompt in prompts("moor"):
        answer = fleet.complete("acme/tiny", prompt, max_tokens=2)
        (decision,) = fleet.explained(answer["id"])["decisions"]
        holders |= {
            each["worker"] for each in decision["candidates"] if each["facts"]["device_tokens"] >= 160
        }
    assert holders == {worker.id for worker in fleet.workers}
    with fleet.open("/admin/workers") as response:
        identity = {each["id"]: each["identity"] for each in json.load(response)["workers"]}
    first, second, other = (identity[worker.id] for worker in fleet.workers)
    assert first == second != other
    assert len(set(identity.values())) == 2, "the hub's copy is the same checkpoint, of one of these types"


def test_a_stream_whose_worker_dies_goes_on_at_one_that_computes_the_same(fleet: Fleet) -> None:
    """The only worker of its identity dies: it waits until that is back, and goes on with the very tokens."""
    (other,) = (worker for worker, dtype in zip(fleet.workers, DTYPES, strict=True) if dtype == "bfloat16")
    # Whichever worker gets a prompt first, gets it again, as it is cached there, unless it is slow then.
    fleet.complete_together("acme/tiny", prompts("forest"), max_tokens=2)
    for prompt in prompts("forest"):
        # First in short: of a long answer by one of the others nothing is compared.
        short = fleet.complete("acme/tiny", prompt, max_tokens=2)
        if fleet.explained(short["id"])["decisions"][0]["worker"] != other.id:
            continue
        whole = fleet.complete("acme/tiny", prompt, max_tokens=LONG, ignore_eos=True)
        if fleet.explained(whole["id"])["decisions"][0]["worker"] != other.id:
            continue
        text, went = fleet.stream_with_kill("acme/tiny", prompt, other)
        if went[0] == other.id:
            break
    else:
        pytest.fail("none of the prompts was sent to the third worker twice")
    assert text == whole["choices"][0]["text"]
    assert went == [other.id, other.id]
