"""`penstock serve` as a process, with the real demo model and the real engine."""

import asyncio
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from served import COMMAND, PATIENCE_S, Server

from penstock.bench.client import ApiAddress, ApiResponse, Client
from penstock.cli.main import main
from penstock.cli.wiring.state import load_key
from penstock.config.checkpoints import resolve
from penstock.protocol.server_answers import decode_chat_event
from penstock.protocol.stream import EventReader

DEMO = "penstock-demo"
KEY, SCRAPE_KEY = "sk-of-this-test-0123", "sk-scrape-of-this-test"
QUICK = ("--port", "0", "--threads", "1")

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    started: list[Server] = []

    def start(*argv: str, **environment: str) -> Server:
        place = tmp_path / str(len(started))
        place.mkdir()
        started.append(Server(place, *argv, **environment))
        return started[-1]

    yield start
    for one in started:
        one.close()


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie that its parent has not reaped yet counts as ended)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def run(*command: str) -> str:
    """Run a command that must succeed; its standard output."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return done.stdout


class Stream:
    """Counts the chunks of an answer."""

    def __init__(self) -> None:
        self.reader, self.text, self.ended, self.error = EventReader(), "", False, ""
        self.process = ""
        self.first = asyncio.Event()

    def on_bytes(self, data: bytes) -> None:
        for event in self.reader.feed(data):
            if event == b"[DONE]":
                self.ended = True
                continue
            chunk = decode_chat_event(event)
            self.error = str(chunk.error or self.error)
            self.process = self.process or json.loads(event).get("id", "")[: len("chatcmpl-") + 16]
            for choice in chunk.choices:
                self.text += choice.content
                if choice.is_output:
                    self.first.set()


def ask(content: str, **fields: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return msgspec.json.encode({"model": DEMO, "messages": messages, "temperature": 0, **fields})


def long_answer(server: Server, num_tokens: int, then: Callable[[], None]) -> Stream:
    """Stream an answer, call `then` at its first token, and wait for its end."""

    async def main() -> Stream:
        client, stream = Client(ApiAddress.parse(server.url), key=server.key), Stream()
        body = ask("Count.", stream=True, max_tokens=num_tokens, ignore_eos=True)
        task = asyncio.create_task(client.post("/chat/completions", body, stream))
        async with asyncio.timeout(PATIENCE_S):
            await stream.first.wait()
            then()
            await asyncio.wait([task])
        assert task.exception() is None or not stream.ended
        await client.close()
        return stream

    return asyncio.run(main())


def get(server: Server, path: str, key: str = "") -> ApiResponse:
    async def main() -> ApiResponse:
        url = server.url.removesuffix("/v1")
        at = ApiAddress.parse(url)
        client = Client(ApiAddress(at.scheme, at.host, at.port, ""), key=key or server.key)
        try:
            return await client.get(path)
        finally:
            await client.close()

    return asyncio.run(main())


def test_one_command_to_a_streamed_answer_and_a_clean_end(serve: Callable[..., Server]) -> None:
    server = serve(*QUICK)
    server.wait_ready()
    out, err = server.out.read_text(), server.err.read_text()
    assert re.search(r"ready after \d+\.\d s", out)
    assert f"models     {DEMO}" in out
    assert f"{DEMO}: ready" in err  # Lines, because nobody's terminal is there.
    assert "\x1b" not in out + err
    assert "Traceback" not in err

    # `chat` finds the key of our own server by itself.
    port = ApiAddress.parse(server.url).port
    assert load_key("127.0.0.1", port) == server.key != ""
    said = subprocess.run(
        [
            sys.executable,
            "-m",
            "penstock",
            "chat",
            "--url",
            server.url,
            "--temperature",
            "0",
            "What is Penstock?",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "Penstock" in said.stdout

    if shutil.which("curl"):
        curl = next(line for line in out.splitlines() if line.startswith("curl "))
        assert run("sh", "-c", curl + " -s").rstrip().endswith("data: [DONE]")
    assert get(server, "/ready").status == 200
    snippet = out.partition("from openai")[2].partition("\n\n")[0]
    assert run(sys.executable, "-c", "from openai" + snippet).strip()

    second = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, check=False)
    assert (second.returncode, second.stdout) == (2, "")
    assert second.stderr.startswith(f"penstock: port {port} on 127.0.0.1 is in use; ")

    workers = server.workers
    assert len(workers) == 1
    stream = long_answer(server, 600, then=lambda: server.process.send_signal(signal.SIGINT))
    assert stream.ended
    assert stream.error == ""
    assert server.wait_ended() == 0
    assert "draining 1 stream (Ctrl-C again to stop now)" in server.err.read_text()
    assert all(gone(pid) for pid in workers)
    assert load_key("127.0.0.1", port) == ""


def test_a_second_ctrl_c_stops_at_once(serve: Callable[..., Server]) -> None:
    server = serve(*QUICK, PENSTOCK_API_KEY="sk-of-the-operator")
    server.wait_ready()
    assert "sk-of-the-operator" not in server.out.read_text() + server.err.read_text()
    workers = server.workers

    async def main() -> None:
        client, stream = Client(ApiAddress.parse(server.url), key="sk-of-the-operator"), Stream()
        body = ask("Count.", stream=True, max_tokens=2000, ignore_eos=True)
        task = asyncio.create_task(client.post("/chat/completions", body, stream))
        async with asyncio.timeout(PATIENCE_S):
            await stream.first.wait()
            server.process.send_signal(signal.SIGINT)
            await asyncio.to_thread(server.wait_said, "draining 1 stream")
            server.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(server.wait_ended) == 130
            await asyncio.wait([task])
        assert not stream.ended or stream.error

    asyncio.run(main())
    server.until(lambda: all(gone(pid) for pid in workers), "a worker is left")
    assert "Traceback" not in server.err.read_text()


def test_a_worker_that_is_down_for_good_is_reported(serve: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"models: [{{path: {DEMO}, engine: {{restarts_max: 0}}}}]")
    server = serve(*QUICK, "-c", str(file))
    server.wait_ready()
    os.kill(server.workers[0], signal.SIGKILL)
    server.wait_said("the model cannot answer")
    server.wait_said("killed by SIGKILL")
    ready = get(server, "/ready")
    assert ready.status == 503
    assert b'"stage":"down"' in ready.body  # Anybody may ask; why stands in the log.
    server.process.send_signal(signal.SIGINT)
    assert server.wait_ended() == 0


def test_ctrl_c_while_loading(serve: Callable[..., Server]) -> None:
    server = serve(*QUICK)
    server.wait_said("starting")
    workers = server.workers
    server.process.send_signal(signal.SIGINT)
    assert server.wait_ended() == 0
    assert server.out.read_text() == ""
    server.until(lambda: all(gone(pid) for pid in workers), "a worker is left")


@pytest.mark.parametrize(
    ("argv", "code", "complaint"),
    [
        (("no-such-model",), 2, "penstock: no-such-model: no such directory"),
        (
            ("-c", "{place}/typo.yaml"),
            2,
            "penstock: {place}/typo.yaml: unknown key `server.prot`; did you mean",
        ),
        (("-c", "{place}/absent.yaml"), 2, "penstock: {place}/absent.yaml: cannot be read: No such file"),
        (("--host", "0.0.0.0"), 2, "penstock: auth.keys: needed because"),
        (("--host", "192.0.2.1", "--api-key", "k" * 16), 2, "penstock: server: cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_served_is_said_in_one_message(
    tmp_path: Path, argv: tuple[str, ...], code: int, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "typo.yaml").write_text("server: {prot: 1}")
    assert main(["serve", *(part.format(place=tmp_path) for part in argv)]) == code
    said = capsys.readouterr()
    assert said.out == ""
    (line,) = said.err.splitlines()
    assert line.startswith(complaint.format(place=tmp_path))


def test_a_checkpoint_that_cannot_be_read_is_said_in_one_message(tmp_path: Path) -> None:
    shutil.copytree(resolve("penstock-demo-mini"), tmp_path / "corrupt")
    weights = tmp_path / "corrupt" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    command = [*COMMAND, str(tmp_path / "corrupt"), *QUICK]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    (said,) = [line for line in done.stderr.splitlines() if not line.startswith("corrupt: ")]
    assert said.startswith(f"penstock: {tmp_path}/corrupt/model.safetensors: ")
    assert (done.returncode, done.stdout) == (1, "")


def test_print_config_starts_nothing() -> None:
    done = subprocess.run(
        [*COMMAND, "--print-config", "--port", "1234"], capture_output=True, text=True, check=True
    )
    assert "port: 1234" in done.stdout
    assert done.stderr == ""


def test_sighup_takes_a_new_configuration_and_streams_go_on(
    serve: Callable[..., Server], tmp_path: Path
) -> None:
    config, keys = tmp_path / "penstock.yaml", tmp_path / "keys.jsonl"
    config.write_text("server: {port: 0}\n")
    server = serve("penstock-demo-mini", "--name", DEMO, "-c", str(config), "--threads", "1")
    server.wait_ready()
    key = run(
        sys.executable, "-m", "penstock", "keys", "create", "--tenant", "acme", "--file", str(keys)
    ).strip()

    def reload() -> None:
        config.write_text(f"server: {{port: 1}}\nauth: {{keys_file: {keys}}}\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_said("the new configuration is in force")

    stream = long_answer(server, 400, reload)
    assert stream.ended
    assert not stream.error
    assert "these changes need a restart sections=server" in server.err.read_text()
    # The key that was made at the start was for a server that nobody had told of another one.
    assert get(server, "/v1/models").status == 401
    assert get(server, "/v1/models", key).status == 200
    config.write_text("tiers: nonsense\n")
    server.process.send_signal(signal.SIGHUP)
    server.wait_said("the new configuration was not taken")
    assert get(server, "/v1/models", key).status == 200
    server.process.send_signal(signal.SIGINT)
    assert server.wait_ended() == 0
    assert key not in server.err.read_text()


# --- several gateway processes ---------------------------------------------------------------------


def gateways(server: Server) -> list[int]:
    """The process ids of its gateway processes."""
    return [pid for pid in server.workers if b"gateway_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


async def spread_streams(client: Client, num_tokens: int) -> list[tuple["asyncio.Task[ApiResponse]", Stream]]:
    """Start streams until both processes have taken some: a stream's id begins with its process."""
    started = []
    for _ in range(40):
        stream = Stream()
        body = ask("Count.", stream=True, max_tokens=num_tokens, ignore_eos=True)
        started.append((asyncio.create_task(client.post("/chat/completions", body, stream)), stream))
        await stream.first.wait()
        if len(started) >= 6 and len({stream.process for _, stream in started}) == 2:
            return started
    raise AssertionError("one process took every connection")


def test_one_gateway_process_dies_and_the_others_streams_go_on(serve: Callable[..., Server]) -> None:
    server = serve(
        "penstock-demo-mini",
        "--name",
        DEMO,
        *QUICK,
        "--processes",
        "2",
        "--api-key",
        KEY,
        PENSTOCK_SCRAPE_KEY=SCRAPE_KEY,
    )
    server.wait_ready()
    assert len(gateways(server)) == 2
    victim, survivor = gateways(server)

    async def main() -> None:
        client = Client(ApiAddress.parse(server.url), key=KEY)
        async with asyncio.timeout(PATIENCE_S):
            started = await spread_streams(client, 600)
            os.kill(victim, signal.SIGKILL)
            await asyncio.wait([task for task, _ in started])
            ended = sum(stream.ended for _, stream in started)
            assert 0 < ended < len(started), "the killed process's streams broke, the other's did not"
            for task, _ in started:
                task.exception()
        await client.close()

    asyncio.run(main())
    server.wait_said("a gateway process ended")
    server.until(lambda: len(gateways(server)) == 2 and victim not in gateways(server), "it never came back")
    assert survivor in gateways(server)
    scrape = ("curl", "-s", "-H", f"Authorization: Bearer {SCRAPE_KEY}")
    status = run(*scrape, f"{server.url.removesuffix('/v1')}/status.json")
    server.until(lambda: '"processes":2' in run(*scrape, server.url[:-3] + "/status.json"), status)
    text = run(*scrape, server.url[:-3] + "/metrics")
    found = re.search(r'requests_total\{endpoint="chat",model="penstock-demo",outcome="length"\} (\d+)', text)
    assert found
    assert int(found[1]) > 0
    assert re.search(r'penstock_workers\{model="penstock-demo",state="ready"\} 1.0', text)
    server.process.send_signal(signal.SIGHUP)
    in_force = "the new configuration is in force"  # Says the parent, which judged it, and each process.
    server.until(lambda: server.err.read_text().count(in_force) >= 3, "no reload")
    server.process.send_signal(signal.SIGINT)
    assert server.wait_ended() == 0
    assert gone(survivor)


def test_no_gateway_process_outlives_its_parent(serve: Callable[..., Server]) -> None:
    server = serve("penstock-demo-mini", *QUICK, "--processes", "2", "--no-auth")
    server.wait_ready()
    pids = server.workers
    server.process.kill()
    server.until(lambda: all(gone(pid) for pid in pids), "a process was left behind")


def test_all_gateway_processes_say_why_a_worker_died(serve: Callable[..., Server], tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(f"models: [{{path: {DEMO}, engine: {{restarts_max: 1}}}}]")
    server = serve(
        *QUICK, "-c", str(file), "--processes", "2", "--api-key", KEY, PENSTOCK_SCRAPE_KEY=SCRAPE_KEY
    )
    server.wait_ready()

    def kill_the_worker() -> None:
        os.kill(next(pid for pid in server.workers if b"gateway_process" not in cmdline(pid)), signal.SIGKILL)

    def all_say(path: str, words: bytes, key: str = "") -> Callable[[], bool]:
        """Each of many new connections may be another process's."""
        return lambda: all(words in get(server, path, key).body for _ in range(12))

    kill_the_worker()
    note = b"UTC: the worker was killed by SIGKILL"
    server.until(all_say("/status.json", note, SCRAPE_KEY), "a process has no note of it")
    server.until(lambda: get(server, "/ready").status == 200, "the worker never came back")
    kill_the_worker()
    server.until(
        all_say("/status.json", b"SIGKILL, and 1 restarts were in vain", SCRAPE_KEY),
        "a process does not say why",
    )
    assert all_say("/ready", b'"stage":"down"')()
    assert get(server, "/health").status == 503


def cmdline(pid: int) -> bytes:
    return Path(f"/proc/{pid}/cmdline").read_bytes()
