"""The defects of issue 15, asked of any checkout over sockets and on its command line.

    python bench/defects.py [--tree DIR] [--only NAME] [--json FILE]

Each question starts `python -m penstock` of that checkout, with this environment's packages, does what a user
does, and says what was seen and whether that is right. docs/design/019-a-look-from-outside.md has the tests
beside them.
"""

import http.client
import json
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from checkout import ENGINE, KEY, Seen, Tree, code
from defects_outside import OUTSIDE
from defects_smaller import SMALLER
from harness import REPOSITORY, command_line, write_result

WHEEL_FLAGS = ("-q", "--no-deps", "--no-build-isolation")
PYTEST_FLAGS = ("-q", "-p", "no:cacheprovider", "-n0")


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


QUESTIONS: dict[str, tuple[str, Callable[[Tree], Seen]]] = {
    each.__name__: (item, each)
    for item, each in (
        ("1", rows_invariant), ("2", renamed), ("4", provider_gets_it), ("5", tool_loop),
        ("6", damaged_ledger), ("7", hostile_template), ("7", many_layers), ("7", special_tokens),
        ("8", foreign_pages), ("8", disclosure), ("9", wheel), *SMALLER,
        *OUTSIDE,
    )
}  # fmt: skip


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--tree", type=Path, default=REPOSITORY)
    parser.add_argument("--only", action="append", choices=QUESTIONS)
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
