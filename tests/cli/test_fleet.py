"""A fleet of real processes: the worked example of docs/fleet.md, step by step, and the example
configuration.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from free_port import free_port
from served import Server

from penstock.cli.commands.worker import _key
from penstock.cli.main import main
from penstock.config.checks import check
from penstock.config.load import load_config
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.protocol.address import TcpAddress

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.timeout(240)
KEYS, ADMIN = ("sk-one-tenant-0000000001", "sk-another-tenant-000002"), "sk-the-operators-key-0003"
"""Servers that ask nobody for a key take any."""


def answer(server: Server, content: str) -> dict[str, Any]:
    """One request, on a connection of its own: whichever process takes it; by one of two tenants, the same
    for the same content.
    """
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    key = KEYS[sum(content.encode()) % len(KEYS)]
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"{server.url}/chat/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return {"status": response.status, **json.load(response)}


def ask(server: Server, content: str = "Hi.") -> int:
    """One request; its status."""
    return answer(server, content)["status"]


def cached(server: Server, content: str) -> int:
    """Tokens of a prompt that its worker had already."""
    return answer(server, content)["usage"]["prompt_tokens_details"]["cached_tokens"]


def seen(server: Server, path: str) -> bytes:
    """A page for operators."""
    url = server.url.removesuffix("/v1") + path
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {ADMIN}"})
    with urllib.request.urlopen(request, timeout=60) as response:
        return response.read()


def fleet(server: Server) -> dict[str, Any]:
    return json.loads(seen(server, "/admin/workers"))


def states(server: Server) -> dict[str, str]:
    return {worker["id"]: worker["state"] for worker in fleet(server)["workers"]}


def own_events(server: Server) -> int:
    """Blocks in the KV index that a worker told of."""
    page = seen(server, "/metrics").decode()
    all_of_them, predicted = (
        re.search(rf"^penstock_kv_index_{name} (\S+)$", page, re.MULTILINE)
        for name in ("entries", "predicted_entries")
    )
    assert all_of_them
    assert predicted
    return int(float(all_of_them[1]) - float(predicted[1]))


class Bill:
    """What two machines have cost at a dollar a second each, between when it was made and `holds`."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.first = self.look()

    def look(self) -> tuple[float, float, float]:
        """The bill, and the time just before and after it was asked for."""
        before_s = time.monotonic()
        with urllib.request.urlopen(
            self.server.url.removesuffix("/v1") + "/status.json", timeout=60
        ) as answer:
            (cost,) = json.load(answer)["costs"]
        assert sum(cost[part] for part in ("requests", "platform", "idle", "reserve")) == pytest.approx(
            cost["bill"]
        )
        return cost["bill"], before_s, time.monotonic()

    def holds(self) -> bool:
        """Within 0.1 % of price * wall seconds."""
        bill, before_s, after_s = self.look()
        grown = bill - self.first[0]
        return 1.998 * (before_s - self.first[2]) <= grown <= 2.002 * (after_s - self.first[1])


def usage(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    capsys.readouterr()
    assert main(["usage", "--format", "json", *argv]) == 0
    return json.loads(capsys.readouterr().out)


def test_the_worked_example(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And the bill: two machines at a dollar a second each."""
    text = (ROOT / "docs" / "fleet.md").read_text()
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found
    file = tmp_path / "fleet.yaml"
    config = (
        f"{found[1]}\nprices: {{accelerators: {{tiny: 3600}}}}\nledger: {{directory: {tmp_path}/ledger}}\n"
    )
    file.write_text(config)
    port = free_port()
    server = Server(tmp_path, "-c", str(file), "--port", str(port), "--no-auth")
    try:
        one_dies_while_it_loads(server, port)
        server.wait_ready()
        server.wait_said("a worker does not come up; its model has others")
        server.until(lambda: set(states(server).values()) == {"ready"}, "it did not come back")
        bill = Bill(server)
        assert states(server) == {"tiny-0": "ready", "tiny-1": "ready"}
        assert len(server.workers) == 2
        os.kill(server.workers[0], signal.SIGKILL)
        assert [ask(server) for _ in range(10)] == [200] * 10
        server.wait_said("the worker was killed by SIGKILL; restart 1")
        server.until(lambda: set(states(server).values()) == {"ready"}, "it did not come back")
        assert "the model cannot answer" not in server.err.read_text()
        server.until(bill.holds, "the accounts are not price * wall seconds")
        file.write_text(config.replace("replicas: 2", "replicas: 1"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("a worker has left")
        assert states(server) == {"tiny-0": "ready"}
        server.until(lambda: len(server.workers) == 1, "its process is still there")
        assert ask(server) == 200
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() == 0
        assert "Traceback" not in server.err.read_text()
        (cost,) = usage(capsys, "--cost", "-c", str(file))["rows"]
        assert cost["reserve"] > 0 < cost["idle"]
        assert cost["floor"] > 0, cost
        ledger = usage(capsys, "--by", "", "-c", str(file))["total"]
        assert cost["requests"] == pytest.approx(ledger["accelerator_cost"], abs=1e-9)
        assert cost["tokens"] == ledger["prompt_tokens"] + ledger["completion_tokens"]
    finally:
        server.close()


def one_dies_while_it_loads(server: Server, port: int) -> None:
    """Both stand still until the server has told them what to load: then one dies, and one goes on."""
    started: list[int] = []

    def have_begun() -> bool:
        started[:] = server.workers
        # One that has not executed its program yet is a copy of the server, which waits for it.
        return len(started) == 2 and all(
            b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in started
        )

    server.until(have_begun, "no workers")
    first, second = started
    for pid in started:
        os.kill(pid, signal.SIGSTOP)
    server.until(lambda: len(workers_at(port)) == 2, "they are not known")
    os.kill(first, signal.SIGKILL)
    os.kill(second, signal.SIGCONT)


def workers_at(port: int) -> list[dict[str, Any]]:
    """What a server says of its workers, before it is ready; nothing before it listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/admin/workers", timeout=60) as response:
            return json.load(response)["workers"]
    except OSError:
        return []


def history(server: Server) -> dict[str, list[int]]:
    return json.loads(seen(server, "/admin/history?seconds=3600"))["total_summary"]


def by_tenant(server: Server, days: int) -> list[int]:
    """Requests of all tenants, and how many tenants these are."""
    reported = json.loads(seen(server, f"/admin/costs?by=tenant&days={days}"))
    return [reported["total"]["requests"], len(reported["usage"])]


def test_several_gateway_processes_follow_their_workers(tmp_path: Path) -> None:
    file = tmp_path / "fleet.yaml"
    config = "models: [{path: penstock-demo-mini, name: tiny, replicas: 2, engine: {threads: 1}}]"
    config += f"\nauth: {{keys: [{', '.join(KEYS)}], admin_keys: [{ADMIN}]}}"
    file.write_text(config)
    server = Server(tmp_path, "-c", str(file), "--port", "0", "--processes", "2")
    try:
        server.wait_ready()
        server.until(lambda: states(server) == {"tiny-0": "ready", "tiny-1": "ready"}, "they do not see both")
        prompts = [f"{number}: {'what one of them knows, both do; ' * 10}" for number in range(8)]
        usages = [answer(server, prompt)["usage"] for prompt in prompts]
        assert not any(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
        blocks = 2 * sum(usage["prompt_tokens"] // 16 for usage in usages)  # In the indexes of both.
        server.until(lambda: own_events(server) >= blocks, "both do not hear of what is cached")
        found = [cached(server, prompt) > 0 for prompt in prompts for _ in range(2)]
        # A process that knew half would hit every second time; one that knows all may find a worker too busy.
        assert sum(found) >= 13, found
        file.write_text(config.replace("replicas: 2", "replicas: 1"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("a worker has left")
        for _ in range(8):  # Whichever process answers.
            server.until(lambda: states(server) == {"tiny-0": "ready"}, "one holds on to it")
            assert ask(server) == 200
        file.write_text(config)
        server.process.send_signal(signal.SIGHUP)
        server.until(
            lambda: states(server) == {"tiny-0": "ready", "tiny-1": "ready"}, "it does not come back"
        )
        root = server.url.removesuffix("/v1")
        assert main(["drain", "tiny-1", "--url", root, "--key", ADMIN]) == 0
        for _ in range(8):
            assert states(server) == {"tiny-0": "ready", "tiny-1": "gone"}
            assert ask(server) == 200
        server.until(lambda: len(server.workers) == 3, "its process is still there")
        assert main(["drain", "tiny-1", "--url", root, "--key", ADMIN, "--undo"]) == 0
        for _ in range(8):
            server.until(lambda: states(server) == {"tiny-0": "ready", "tiny-1": "ready"}, "it stays away")
        begun = [fleet(server)["models"][0]["ttft_count"] for _ in range(4)]
        assert begun == [40] * 4, "answers of all processes are counted, whichever is asked"
        for _ in range(4):
            server.until(lambda: history(server)["requests"] == [40], "the history has not all of them")
        for days in range(1, 5):  # Whichever is asked; each question is read anew.
            server.until(lambda days=days: by_tenant(server, days) == [40, 2], "costs lack some of them")
        os.kill(server.workers[0], signal.SIGKILL)
        assert [ask(server, f"{number}") for number in range(8)] == [200] * 8, "nobody notices, in neither"
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() == 0
    finally:
        server.close()


def test_a_worker_on_its_own_with_a_key(tmp_path: Path) -> None:
    port = free_port()
    key = {"PENSTOCK_WORKER_KEY": "a key that both sides have"}
    command = [sys.executable, "-m", "penstock", "worker", "penstock-demo-mini", "--name", "tiny"]
    worker = subprocess.Popen(
        [*command, "--listen", f"tcp:127.0.0.1:{port}", "--threads", "1"],
        env={**os.environ, **key}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    )  # fmt: skip
    file = tmp_path / "fleet.yaml"
    at = f"{{url: 'tcp:127.0.0.1:{port}', engine: penstock, api_key_env: PENSTOCK_WORKER_KEY}}"
    dead = "{url: 'tcp:127.0.0.1:1', engine: penstock}"
    file.write_text(
        f"models: [{{path: penstock-demo-mini, name: tiny, replicas: 0, workers: [{at}, {dead}]}}]"
    )
    server = Server(tmp_path, "-c", str(file), "--port", "0", "--no-auth", **key)
    try:
        assert worker.stdout is not None
        assert worker.stdout.readline() == f"worker of tiny ready at tcp:127.0.0.1:{port}\n"
        server.wait_ready()
        server.wait_said("field=models[0].workers[1].url address=tcp:127.0.0.1:1 stage=")
        server.wait_said("cannot connect to tcp:127.0.0.1:1: ")
        alive, dead = f"tiny@tcp:127.0.0.1:{port}", "tiny@tcp:127.0.0.1:1"
        server.until(lambda: states(server) == {alive: "ready", dead: "starting"}, "it is not ready")
        assert ask(server) == 200
        assert ask(server, "Tell me of the sea, of its ships, and of all who sail on it. " * 3) == 200
        server.until(lambda: own_events(server) > 0, "its KV events are of no use")
        server.process.send_signal(signal.SIGINT)
        assert server.wait_ended() == 0
        assert worker.poll() is None, "it is not ours to end"
        worker.send_signal(signal.SIGTERM)
        assert worker.wait(60) == 0
    finally:
        server.close()
        worker.kill()
        worker.communicate()


def test_a_worker_that_others_can_reach_wants_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PENSTOCK_WORKER_KEY", raising=False)
    with pytest.raises(ConfigError, match="PENSTOCK_WORKER_KEY: needed because other machines can reach"):
        _key(TcpAddress("0.0.0.0", 9100))
    assert _key(TcpAddress("127.0.0.1", 9100)) == b""
    monkeypatch.setenv("PENSTOCK_WORKER_KEY", "short")
    with pytest.raises(ConfigError, match="shorter than 16 bytes"):
        _key(TcpAddress("127.0.0.1", 9100))


def test_the_example_has_two_models_and_three_kinds_of_workers() -> None:
    config = load_config(ROOT / "examples" / "fleet.yaml")
    check(config)
    assert isinstance(config, Config)
    first, second = config.models
    assert (first.replicas, second.replicas) == (2, 2)
    assert [worker.engine for worker in first.workers] == ["penstock", "vllm"]
