"""The defects of issue 15, asked of any checkout over sockets and on its command line.

    python bench/defects.py [--tree DIR] [--only NAME] [--json FILE]

Each question starts `python -m penstock` of that checkout, with this environment's packages, does what a user
does, and says what was seen and whether that is right. docs/design/019-defects.md has the tests beside them.
"""

import argparse
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from provenance import REPOSITORY, write_result

START_S = 90.0
WHEEL_FLAGS = ("-q", "--no-deps", "--no-build-isolation")
PYTEST_FLAGS = ("-q", "-p", "no:cacheprovider", "-n0")
KEY = "sk-defects-0123456789abcdef"
ENGINE = "{threads: 1, kv_memory_bytes: 33554432}"


class Seen(NamedTuple):
    """What a question found."""

    is_right: bool
    what: str


class Tree:
    """A checkout."""

    def __init__(self, root: Path, place: Path) -> None:
        self.root, self.place = root, place
        self.model = root / "models" / "penstock-demo-mini"
        self._count = 0

    def environment(self, **more: str) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        state = self.place / "state"
        return {
            **kept,
            "PYTHONPATH": str(self.root),
            "PENSTOCK_STATE_DIR": str(state),
            "COLUMNS": "80",
            **more,
        }

    def run(self, *args: str, timeout_s: float = 30.0) -> tuple[int, str]:
        """A command's exit status (124: it was ended) and what it printed."""
        command = [sys.executable, "-m", "penstock", *args]
        try:
            done = subprocess.run(
                command, env=self.environment(), cwd=self.place, capture_output=True, text=True,
                timeout=timeout_s, check=False,
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            return 124, str(error.stdout or "")
        return done.returncode, done.stdout + done.stderr

    def checkpoint(self, **changed: dict[str, Any]) -> Path:
        """The demo model with fields of its files changed (`config`, `tokenizer_config`)."""
        self._count += 1
        place = self.place / f"model-{self._count}"
        shutil.copytree(self.model, place)
        for name, fields in changed.items():
            file = place / f"{name}.json"
            file.write_text(json.dumps(json.loads(file.read_text()) | fields))
        return place

    @contextmanager
    def serve(self, models: str = "", more: str = "auth: {disabled: true}") -> Iterator["Server"]:
        self._count += 1
        place = self.place / f"server-{self._count}"
        place.mkdir()
        models = models or f"  - {{path: {self.model}, name: m, engine: {ENGINE}}}"
        server = Server(self, place, f"models:\n{models}\n{more}\n")
        try:
            yield server
        finally:
            server.close()


class Server:
    """A `penstock serve` that is ready."""

    def __init__(self, tree: Tree, place: Path, config: str) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (place / "penstock.yaml").write_text(config)
        self.log = place / "log"
        self._tree, self._place = tree, place
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "-c", str(self._place / "penstock.yaml")]
        with self.log.open("ab") as out:
            self.child = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=out, stderr=out, cwd=self._place,
                env=self._tree.environment(PENSTOCK_STATE_DIR=str(self._place / "state")),
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.ask("GET", "/ready")[0] == 200:
                    return
            except OSError:
                pass
            if self.child.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(self.log.read_text()[-400:])
            time.sleep(0.2)

    def ask(
        self, method: str, path: str, body: object = None, headers: dict[str, str] | None = None
    ) -> tuple[int, Any]:
        """Status and body: JSON where it is."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        try:
            return answer.status, json.loads(text)
        except ValueError:
            return answer.status, text

    def chat(
        self,
        content: str | list[dict[str, Any]] = "Hello",
        headers: dict[str, str] | None = None,
        **more: object,
    ) -> tuple[int, Any]:
        messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
        body = {"model": "m", "messages": messages, "max_tokens": 2, **more}
        return self.ask("POST", "/v1/chat/completions", body, headers)

    def kill(self) -> None:
        """All of it, at once."""
        os.killpg(self.child.pid, signal.SIGKILL)
        self.child.wait()

    def close(self) -> None:
        if self.child.poll() is None:
            os.killpg(self.child.pid, signal.SIGTERM)
            try:
                self.child.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def code(body: object) -> str:
    error = body.get("error", {}) if isinstance(body, dict) else {}
    return str(error.get("code") or error.get("message", ""))[:80]


# --- the questions ------------------------------------------------------------------------------------


def rows_invariant(tree: Tree) -> Seen:
    """A row of torch's float32 products does not depend on how many there are, without AVX-512."""
    test = "tests/engine/layers/test_linear.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *PYTEST_FLAGS, test, "-k", "how_many_there_are"],
        env=tree.environment(ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2",
                             ONEDNN_MAX_CPU_ISA="AVX2"),
        cwd=tree.root, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return Seen(done.returncode == 0, done.stdout.strip().splitlines()[-1])


def renamed(tree: Tree) -> Seen:
    """Under another name than its directory's, the router knows where a prompt that comes again is cached."""
    with tree.serve(f"  - {{path: {tree.model}, name: mini, replicas: 2, engine: {ENGINE}}}") as server:
        known = 0
        for number in (*range(12), *range(12)):
            prompt = f"{number} " + f"tells of the river and its mills in {number} years. " * 8
            body = {"model": "mini", "prompt": prompt, "max_tokens": 1}
            answer = server.ask("POST", "/v1/completions", body)[1]
            decided = json.dumps(server.ask("GET", f"/admin/explain/{answer['id']}")[1])
            known += bool(re.search(r'"device_tokens": [1-9]', decided))
            time.sleep(0.1)  # The events of its blocks arrive.
    return Seen(known == 12, f"{known} of 12 decisions knew of cached tokens")


def provider_gets_it(tree: Tree) -> Seen:
    """`response_format` reaches a provider as it came."""
    got: list[dict[str, Any]] = []

    class Provider(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there.
            pass

        def _send(self, body: bytes, kind: str) -> None:
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_GET(self) -> None:
            self._send(b'{"object":"list","data":[{"id":"remote","object":"model"}]}', "application/json")

        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "remote"}
            choice = {"index": 0, "delta": {"role": "assistant", "content": "{}"}, "finish_reason": "stop"}
            usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
            lines = [{**chunk, "choices": [choice]}, {**chunk, "choices": [], "usage": usage}]
            body = b"".join(b"data: %b\n\n" % json.dumps(line).encode() for line in lines)
            self._send(body + b"data: [DONE]\n\n", "text/event-stream")

    provider = ThreadingHTTPServer(("127.0.0.1", 0), Provider)
    threading.Thread(target=provider.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{provider.server_port}"
    worker = f"{{url: '{url}', engine: openai, served_model: remote, max_model_len: 4096}}"
    models = f"  - {{path: {tree.model}, name: m, replicas: 0, workers: [{worker}]}}"
    with tree.serve(models) as server:
        form = {"type": "json_object"}
        status, body = server.chat(response_format=form)
    provider.shutdown()
    came = any(each.get("response_format") == form for each in got)
    return Seen(status == 200 and came, f"{status} {code(body) if status != 200 else ''} forwarded: {came}")


def tool_loop(tree: Tree) -> Seen:
    """A message that another server wrote is sent back with its fields."""
    extra = {"provider_specific_fields": None, "annotations": [], "audio": None, "refusal": None}
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "Hi", "cache_control": {"type": "ephemeral"}},
        {"role": "assistant", "content": None, "tool_calls": [call], **extra},
        {"role": "tool", "tool_call_id": "c1", "content": "1"},
    ]
    with tree.serve() as server:
        status, body = server.chat(messages)
    return Seen(status == 200, f"{status} {code(body) if status != 200 else ''}")


def damaged_ledger(tree: Tree) -> Seen:
    """A flipped byte in the newest segment, after kill -9 with four open requests, is kept and logged."""
    with tree.serve(more="auth: {disabled: true}\nadmission: {ttft_target_ms: 0}") as server:
        for _ in range(4):
            body = {"model": "m", "prompt": "Once", "max_tokens": 900, "stream": True, "ignore_eos": True}
            open_request = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
            headers = {"Content-Type": "application/json"}
            open_request.request("POST", "/v1/completions", json.dumps(body), headers)
            open_request.getresponse().read(200)
        server.kill()
        state = server.log.parent / "state"
        newest = max(
            (each for each in state.rglob("*") if each.is_file() and "journal" in str(each)),
            key=lambda each: (each.stat().st_size > 100, each.stat().st_mtime),
        )
        data = bytearray(newest.read_bytes())
        length = len(data.rstrip(b"\0"))
        data[length // 3] ^= 0xFF
        newest.write_bytes(data)
        server.start()
        time.sleep(2)
        kept = [each for each in state.rglob("*") if "damaged" in str(each) and each.is_file()]
        said = "damage" in server.log.read_text()
    return Seen(bool(kept) and said, f"kept: {len(kept)} files; logged: {said}")


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def hostile_template(tree: Tree) -> Seen:
    """/health answers while a chat template loops."""
    place = tree.checkpoint(tokenizer_config={"chat_template": LOOPS})
    with tree.serve(f"  - {{path: {place}, name: m, engine: {ENGINE}}}") as server:
        threading.Thread(target=lambda: _quietly(server.chat), daemon=True).start()
        time.sleep(1)
        began = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=8)
            connection.request("GET", "/health")
            status: object = connection.getresponse().status
        except OSError as error:
            status = type(error).__name__
        took_s = time.monotonic() - began
        server.kill()
    return Seen(status == 200 and took_s < 4, f"/health: {status} after {took_s:.1f} s")


def _quietly(work: Callable[[], object]) -> None:
    with suppress(OSError, http.client.HTTPException):
        work()


def many_layers(tree: Tree) -> Seen:
    """10^9 layers are refused at once."""
    place = tree.checkpoint(config={"num_hidden_layers": 10**9})
    began = time.monotonic()
    script = f"ulimit -v 12000000; exec {sys.executable} -m penstock serve {place} --port 0 --no-auth"
    try:
        done = subprocess.run(
            ["bash", "-c", script], env=tree.environment(), cwd=tree.place, capture_output=True, text=True,
            timeout=30, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return Seen(False, "nothing was said in 30 s")
    words = (done.stdout + done.stderr).strip().splitlines()
    took_s = time.monotonic() - began
    return Seen(
        done.returncode in (1, 2) and "layers" in (words or [""])[-1],
        f"{took_s:.0f} s: {(words or [''])[-1][:120]}",
    )


def special_tokens(tree: Tree) -> Seen:
    """The text of a special token in a message is more than one token."""
    with tree.serve() as server:
        plain = server.chat("x")[1]["usage"]["prompt_tokens"]
        evil = server.chat("x<|im_end|>")[1]["usage"]["prompt_tokens"]
    return Seen(evil > plain + 1, f"'<|im_end|>' in a message is {evil - plain} tokens")


def foreign_pages(tree: Tree) -> Seen:
    """Without keys a page of another site drains nothing."""
    headers = {"Host": "evil.example", "Origin": "https://evil.example", "Content-Type": "text/plain"}
    with tree.serve() as server:
        worker = server.ask("GET", "/admin/workers")[1]["workers"][0]["id"]
        status, body = server.ask("POST", f"/admin/workers/{worker.replace('/', '%2F')}/drain", {}, headers)
    return Seen(status == 403, f"POST .../drain: {status} {code(body) if status != 200 else ''}")


def disclosure(tree: Tree) -> Seen:
    """With keys, /metrics wants one, and /ready has no counters."""
    with tree.serve(more=f"auth: {{keys: [{KEY}]}}") as server:
        status, ready = server.ask("GET", "/metrics")[0], server.ask("GET", "/ready")[1]
    fields = sorted(set(ready["models"][0]) - {"name", "ready", "stage", "progress"})
    return Seen(status == 401 and not fields, f"/metrics without a key: {status}; /ready tells also {fields}")


def wheel(tree: Tree) -> Seen:
    """A wheel has a demo model and fits any Python."""
    copy, out = tree.place / "source", tree.place / "wheel"
    shutil.copytree(tree.root, copy, ignore=shutil.ignore_patterns(".git", ".venv", "out", "*.so"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *WHEEL_FLAGS, "-w", str(out), str(copy)],
        env={**tree.environment(), "PENSTOCK_NO_NATIVE": "1", "PYTHONPATH": ""}, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        return Seen(False, done.stderr[-200:])
    (made,) = out.iterdir()
    names = subprocess.run(
        [sys.executable, "-m", "zipfile", "-l", str(made)], capture_output=True, text=True, check=True
    ).stdout
    has = "model.safetensors" in names
    return Seen(has and "py3-none" in made.name, f"{made.name}, demo model inside: {has}")


def content_type(tree: Tree) -> Seen:
    """A body of the wrong type gets 415."""
    with tree.serve() as server:
        status = server.chat(headers={"Content-Type": "application/xml"})[0]
    return Seen(status == 415, str(status))


def half_closed(tree: Tree) -> Seen:
    """A client that shuts its side gets its answer."""
    with tree.serve() as server, socket.create_connection(("127.0.0.1", server.port), 30) as client:
        body = json.dumps({"model": "m", "prompt": "Once", "max_tokens": 60, "ignore_eos": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{server.port}\r\n"
        kind = "Content-Type: application/json"
        client.sendall(f"{head}{kind}\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        client.shutdown(socket.SHUT_WR)
        got = b""
        while chunk := client.recv(65536):
            got += chunk
    return Seen(b"HTTP/1.1 200" in got, f"{len(got)} bytes came")  # Behind interim responses.


def short_keys(tree: Tree) -> Seen:
    """A key of one letter is refused."""
    file = tree.place / "short.yaml"
    file.write_text(f"models:\n  - {{path: {tree.model}}}\nauth: {{keys: [e]}}\n")
    status, said = tree.run("serve", "-c", str(file), "--print-config")
    return Seen(status == 2, f"exit {status}: {said.strip().splitlines()[-1][:100]}")


def did_you_mean(tree: Tree) -> Seen:
    """A mistyped command gets a hint."""
    said = tree.run("serv")[1]
    return Seen(bool(re.search(r"[Dd]id you mean|serve'\?", said)), said.strip().splitlines()[-1][:120])


def completion(tree: Tree) -> Seen:
    """The shell can complete."""
    status, said = tree.run("completion", "bash")
    return Seen(status == 0 and "complete" in said, f"exit {status}")


def tiny_context(tree: Tree) -> Seen:
    """`--max-model-len 1` gives a message."""
    status, said = tree.run("serve", str(tree.model), "--port", "0", "--no-auth", "--max-model-len", "1")
    words = said.strip().splitlines()
    is_said = status in (1, 2) and "Traceback" not in said and len(words) < 12
    return Seen(is_said, f"exit {status}: {(words or [''])[-1][:100]}")


def gguf(tree: Tree) -> Seen:
    """A GGUF directory is named for what it is."""
    place = tree.place / "gguf"
    place.mkdir()
    (place / "model.gguf").write_bytes(b"GGUF" + bytes(64))
    status, said = tree.run("serve", str(place), "--port", "0", "--no-auth")
    return Seen("GGUF" in said and status != 0, f"exit {status}: {said.strip().splitlines()[-1][:100]}")


def cors(tree: Tree) -> Seen:
    """There is a setting for pages of other origins."""
    more = "auth: {disabled: true}\nserver: {cors_origins: ['https://chat.example']}"
    try:
        with tree.serve(more=more) as server:
            status = server.ask("OPTIONS", "/v1/chat/completions", None, {
                "Origin": "https://chat.example", "Access-Control-Request-Method": "POST",
            })[0]  # fmt: skip
    except RuntimeError as error:
        return Seen(False, str(error).strip().splitlines()[-1][:100])
    return Seen(status < 300, f"preflight: {status}")


def polls(tree: Tree) -> Seen:
    """Polls are no lines of the log."""
    with tree.serve() as server:
        before = server.log.read_text().count("/ready") + server.log.read_text().count("/metrics")
        for _ in range(5):
            server.ask("GET", "/metrics")
        time.sleep(0.5)
        lines = server.log.read_text().count("/ready") + server.log.read_text().count("/metrics") - before
    return Seen(lines == 0, f"{lines} lines for 5 polls")


QUESTIONS: dict[str, tuple[str, Callable[[Tree], Seen]]] = {
    each.__name__: (item, each)
    for item, each in (
        ("1", rows_invariant), ("2", renamed), ("4", provider_gets_it), ("5", tool_loop),
        ("6", damaged_ledger), ("7", hostile_template), ("7", many_layers), ("7", special_tokens),
        ("8", foreign_pages), ("8", disclosure), ("9", wheel), ("10 API", content_type),
        ("10 API", half_closed), ("10 security", short_keys), ("10 operator", did_you_mean),
        ("10 operator", completion), ("10 operator", tiny_context), ("10 operator", gguf),
        ("10 operator", cors), ("10 operator", polls),
    )
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tree", type=Path, default=REPOSITORY)
    parser.add_argument("--only", action="append", choices=QUESTIONS)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    tree = args.tree.resolve()
    done = subprocess.run(
        ["git", "-C", str(tree), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        check=True,
    )
    found: list[dict[str, object]] = []
    for name in args.only or QUESTIONS:
        item, ask = QUESTIONS[name]
        with tempfile.TemporaryDirectory(prefix="defects-") as place:
            try:
                seen = ask(Tree(tree, Path(place)))
            except (RuntimeError, OSError, LookupError, TypeError) as error:
                seen = Seen(False, f"{type(error).__name__}: {str(error).strip()[-150:]}")
        asked = (ask.__doc__ or "").strip()
        found.append({"item": item, "name": name, "asked": asked, "right": seen.is_right, "seen": seen.what})
        print(f"{'right' if seen.is_right else 'WRONG'}  {item:12} {name:18} {seen.what}", flush=True)
    write_result(args.json, {"tree": done.stdout.strip(), "asked": found})
    return 0 if all(each["right"] for each in found) else 1


if __name__ == "__main__":
    sys.exit(main())
