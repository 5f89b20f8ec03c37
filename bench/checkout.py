"""A checkout of Penstock, of any day, used as a user does: its command, and its server over sockets."""

import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

START_S = 90.0
KEY = "sk-defects-0123456789abcdef"
ENGINE = "{threads: 1, kv_memory_bytes: 33554432}"


class Seen(NamedTuple):
    """The answer to a question."""

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
    def serve(
        self,
        models: str = "",
        more: str = "auth: {disabled: true}",
        *,
        ready_path: str = "/ready",
        files: int = 0,
    ) -> Iterator["Server"]:
        """`files`: descriptors that the server may have open."""
        self._count += 1
        place = self.place / f"server-{self._count}"
        place.mkdir()
        models = models or f"  - {{path: {self.model}, name: m, engine: {ENGINE}}}"
        server = Server(self, place, f"models:\n{models}\n{more}\n", ready_path, files)
        try:
            yield server
        finally:
            server.close()


class Server:
    """A `penstock serve` that is ready."""

    def __init__(self, tree: Tree, place: Path, config: str, ready_path: str, files: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        (place / "penstock.yaml").write_text(config)
        self.log = place / "log"
        self._tree, self._place, self._ready_path, self._files = tree, place, ready_path, files
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-m", "penstock", "serve", "-c", str(self._place / "penstock.yaml")]
        if self._files:
            command = ["bash", "-c", f'ulimit -n {self._files}; exec "$@"', "-", *command]
        with self.log.open("ab") as out:
            self.child = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=out, stderr=out, cwd=self._place,
                env=self._tree.environment(PENSTOCK_STATE_DIR=str(self._place / "state")),
                start_new_session=True,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while True:
            try:
                if self.ask("GET", self._ready_path)[0] == 200:
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
