"""The smaller defects of issue 15 (its item 10), asked as `bench/defects.py` does."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from checkout import ENGINE, KEY, Seen, Tree


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


def unknown_path(tree: Tree) -> Seen:
    """The 404 of a path under /v1/ does not say that the API is under /v1."""
    with tree.serve() as server:
        status, body = server.ask("POST", "/v1/rerank", {})
    words = str(body.get("error", {}).get("message", "")) if isinstance(body, dict) else ""
    return Seen(status == 404 and "is under /v1" not in words, f"{status}: {words[:100]}")


def tiers(tree: Tree) -> Seen:
    """/v1/models tells the caller's limits."""
    with tree.serve(more=f"auth: {{keys: [{KEY}]}}") as server:
        (model,) = server.ask("GET", "/v1/models", None, {"Authorization": f"Bearer {KEY}"})[1]["data"]
    return Seen("limits" in model, f"fields: {', '.join(model)[:110]}")


def cold(tree: Tree) -> Seen:
    """A request for a model whose first worker is not there yet waits for it."""
    worker = "{url: 'unix:/nowhere/worker.sock', engine: penstock}"
    models = f"  - {{path: {tree.model}, name: m, replicas: 0, workers: [{worker}]}}"
    with tree.serve(models, ready_path="/health") as server:
        began = time.monotonic()
        try:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=4)
            body = json.dumps({"model": "m", "prompt": "Once", "max_tokens": 1})
            connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
            status: object = connection.getresponse().status
        except TimeoutError:
            status = "no answer yet"
        waited_s = time.monotonic() - began
    return Seen(waited_s > 3.5, f"{status} after {waited_s:.1f} s")


def window(tree: Tree) -> Seen:
    """/v1/models tells a model's window before it is ready."""
    with tree.serve(ready_path="/health") as server:
        (model,) = server.ask("GET", "/v1/models")[1]["data"]
        is_ready = server.ask("GET", "/ready")[0] == 200
    told = model.get("max_model_len")
    return Seen(bool(told) and not is_ready, f"max_model_len: {told}" + "; it was ready" * is_ready)


def emptied_keys(tree: Tree) -> Seen:
    """A keys file that was emptied revokes no key."""
    file = tree.place / "keys.jsonl"
    status, said = tree.run("keys", "create", "--file", str(file), "--tenant", "acme")
    key = re.search(r"sk-[\w-]{20,}", said)
    if status or key is None:
        return Seen(False, said[-100:])
    with tree.serve(more=f"auth: {{keys_file: {file}}}") as server:
        headers = {"Authorization": f"Bearer {key[0]}"}
        before = server.chat(headers=headers)[0]
        file.write_bytes(b"")
        time.sleep(5)
        after = server.chat(headers=headers)[0]
    return Seen((before, after) == (200, 200), f"{before}, then {after}")


def no_files(tree: Tree) -> Seen:
    """Out of file descriptors, a request gets 503."""
    with tree.serve(files=256) as server:
        strangers = [socket.create_connection(("127.0.0.1", server.port), 10) for _ in range(300)]
        try:
            status: object = server.ask("GET", "/health")[0]
        except (OSError, http.client.HTTPException) as error:
            status = type(error).__name__
        for each in strangers:
            each.close()
    return Seen(status == 503, f"/health: {status}")


def strangers(tree: Tree) -> Seen:
    """Silent strangers lock no gateway out of a worker's port that has a key."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "penstock",
        "worker",
        str(tree.model),
        "--listen",
        f"tcp:127.0.0.1:{port}",
    ]
    environment = tree.environment(PENSTOCK_WORKER_KEY=KEY)
    worker = subprocess.Popen(
        [*command, "--threads", "1", "--kv-memory", "32MiB"], env=environment, cwd=tree.place,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    crowd = list[socket.socket]()
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                crowd.append(socket.create_connection(("127.0.0.1", port), 5))
                break
            except OSError:
                time.sleep(0.2)
        crowd += [socket.create_connection(("127.0.0.1", port), 5) for _ in range(199)]
        with socket.create_connection(("127.0.0.1", port), 5) as newest:
            newest.settimeout(1.5)
            try:
                greeting = newest.recv(4096)
            except TimeoutError:
                greeting = b"?"  # It waits for the first word of who comes.
    finally:
        for each in crowd:
            each.close()
        worker.kill()
        worker.wait()
    return Seen(bool(greeting), "the 201st connection is " + ("let in" if greeting else "cut at once"))


def plan_table(tree: Tree) -> Seen:
    """`penstock plan` cuts no cell at 80 columns."""
    said = tree.run("plan", "--model", "70b", "--rps", "2")[1]
    return Seen("…" not in said, f"{said.count('…')} cells are cut")


def plan_lacks(tree: Tree) -> Seen:
    """`penstock plan` says that a placement needs what our engine cannot run."""
    said = tree.run("plan", "--model", "70b", "--accelerator", "h100")[1]
    return Seen("needs" in said and "tensor parallelism" in said, said.strip().splitlines()[-1][:110])


def banner(tree: Tree) -> Seen:
    """The banner names an address that works from elsewhere when it listens on all."""
    with tree.serve(more=f"auth: {{keys: [{KEY}]}}\nserver: {{host: 0.0.0.0}}") as server:
        found = re.search(r"API +http://([^:/]+):", server.log.read_text())
    mine = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    host = found[1] if found else "none"
    is_loopback = host.startswith("127.")
    return Seen(
        host in mine or (is_loopback and not mine), "a loopback address" if is_loopback else "its own"
    )


def dead_worker(tree: Tree) -> Seen:
    """The page's numbers show a dead worker of two, and name it and its time."""
    with tree.serve(f"  - {{path: {tree.model}, name: m, replicas: 2, engine: {ENGINE}}}") as server:
        while str(server.ask("GET", "/admin/workers")[1]).count("'ready'") < 2:
            time.sleep(0.2)
        pid = server.child.pid
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        note, deadline = "", time.monotonic() + 20
        while not note and time.monotonic() < deadline:
            time.sleep(0.2)
            models = server.ask("GET", "/status.json")[1]["models"]
            note = " ".join(str(each) for each in models[0].get("notes", ()))
    named = bool(re.search(r"m-\d.*\d\d:\d\d:\d\d", note))
    return Seen(named, f"note: {note[:100] or 'none'}")


def examples_port(tree: Tree) -> Seen:
    """`examples/stream.py` finds the server by PENSTOCK_PORT, and without one it ends in one line."""
    script = tree.root / "examples" / "stream.py"
    with socket.socket() as taken:  # Bound, but nobody listens.
        taken.bind(("127.0.0.1", 0))
        done = subprocess.run(
            [sys.executable, script], cwd=tree.place, capture_output=True, text=True, check=False,
            env=tree.environment(PENSTOCK_PORT=str(taken.getsockname()[1]), PENSTOCK_API_KEY=KEY),
        )  # fmt: skip
        named = str(taken.getsockname()[1]) in done.stderr
    lines = len(done.stderr.splitlines())
    return Seen(lines == 1 and named, f"{lines} lines, the port named: {named}")


def pickled(tree: Tree) -> Seen:
    """A directory with `pytorch_model.bin` only is named for what it is."""
    place = tree.checkpoint()
    (place / "model.safetensors").unlink()
    (place / "pytorch_model.bin").write_bytes(b"PK" + bytes(64))
    status, said = tree.run("serve", str(place), "--port", "0", "--no-auth")
    return Seen(
        "pytorch_model.bin" in said and status != 0, f"exit {status}: {said.strip().splitlines()[-1][:100]}"
    )


def adapter(tree: Tree) -> Seen:
    """An adapter's directory is named for what it is."""
    place = tree.place / "adapter"
    place.mkdir()
    (place / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 8}')
    (place / "adapter_model.safetensors").write_bytes(bytes(8))
    status, said = tree.run("serve", str(place), "--port", "0", "--no-auth")
    return Seen(
        "adapter" in said.replace(str(place), "") and status != 0,
        f"exit {status}: {said.strip().splitlines()[-1][:100]}",
    )


SMALLER: tuple[tuple[str, Callable[[Tree], Seen]], ...] = (
    ("10 API", content_type), ("10 API", half_closed), ("10 API", unknown_path), ("10 API", tiers),
    ("10 API", cold), ("10 API", window), ("10 security", short_keys), ("10 security", emptied_keys),
    ("10 security", strangers), ("10 security", no_files), ("10 operator", did_you_mean),
    ("10 operator", completion), ("10 operator", tiny_context), ("10 operator", gguf),
    ("10 operator", pickled), ("10 operator", adapter), ("10 operator", cors), ("10 operator", polls),
    ("10 operator", plan_table), ("10 operator", plan_lacks), ("10 operator", banner),
    ("10 operator", dead_worker), ("10 operator", examples_port),
)  # fmt: skip
