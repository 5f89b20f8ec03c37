"""The findings of a neighbour, a newcomer and an operator (issue 15: 8 and 10), asked as `bench/defects.py`
does.
"""

import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.client import HTTPConnection

from checkout import KEY, Seen, Tree

WIDTH = 80
PAGE_S = 90


def kv_quota(tree: Tree) -> Seen:
    """One tenant of two may not take most of the KV cache."""
    engine = "{threads: 1, kv_memory_bytes: 4194304, max_running: 8}"
    models = f"  - {{path: {tree.model}, name: m, engine: {engine}}}"
    more = f"auth: {{keys: [{KEY}, {KEY}-of-another], admin_keys: [{KEY}-of-an-admin]}}"
    with tree.serve(models, more) as server:
        admin = {"Authorization": f"Bearer {KEY}-of-an-admin"}
        info = server.ask("GET", "/status.json", None, admin)[1]["models"][0]["info"]
        tokens = info["num_blocks"] * info["block_tokens"]
        headers = {"Authorization": f"Bearer {KEY}"}
        status, body = server.chat(headers=headers, max_tokens=int(0.7 * tokens))
    refused = status == 400 and body["error"]["code"] == "kv_quota_exceeded"
    fits = info["max_model_len"] > 0.8 * tokens  # Or the context would be what refuses.
    return Seen(refused and fits, f"70 % of {tokens} tokens for one: {status}")


@contextmanager
def _plain_proxy(port: int) -> Iterator[int]:
    """The port of a proxy on this machine that passes bytes on and adds no header."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def pump(here: socket.socket, there: socket.socket) -> None:
            with suppress(OSError):  # The other direction has ended it.
                while data := here.recv(65536):
                    there.sendall(data)
                there.shutdown(socket.SHUT_WR)

        def serve() -> None:
            client = listening.accept()[0]
            with client, socket.create_connection(("127.0.0.1", port), 10) as behind:
                threading.Thread(target=pump, args=(client, behind), daemon=True).start()
                pump(behind, client)

        threading.Thread(target=serve, daemon=True).start()
        yield listening.getsockname()[1]


def behind_proxy(tree: Tree) -> Seen:
    """A client behind a proxy that adds no forwarding header is not taken for the machine's own user."""
    with tree.serve(more=f"auth: {{keys: [{KEY}]}}") as server, _plain_proxy(server.port) as port:
        connection = HTTPConnection("127.0.0.1", port, timeout=20)
        connection.request("GET", "/status.json", headers={"Connection": "close"})
        status = connection.getresponse().status
        connection.close()
    return Seen(status == 401, f"/status.json without a key: {status}")


def _width(said: str) -> int:
    return max(map(len, said.splitlines()), default=0)


def usage_table(tree: Tree) -> Seen:
    """`penstock usage` cuts no cell at 80 columns."""
    name = "a-small-model-of-ours"
    with tree.serve(f"  - {{path: {tree.model}, name: {name}}}", f"auth: {{keys: [{KEY}]}}") as server:
        status = server.chat(headers={"Authorization": f"Bearer {KEY}"}, model=name)[0]
    if status != 200:
        return Seen(False, f"the chat: {status}")
    directory = next(each for each in (server.log.parent / "state").rglob("ledger") if each.is_dir())
    said = tree.run("usage", "--directory", str(directory))[1]
    whole = re.search(r"\d{4}-\d\d-\d\d", said) and name in said and "…" not in said
    return Seen(
        bool(whole) and _width(said) <= WIDTH, f"{said.count('…')} cells are cut, {_width(said)} wide"
    )


def top_table(tree: Tree) -> Seen:
    """`penstock top` cuts and breaks no cell at 80 columns, of two workers with a long name."""
    name = "a-small-model-with-a-long-name"
    engine = "{threads: 1, kv_memory_bytes: 4194304}"
    models = f"  - {{path: {tree.model}, name: {name}, replicas: 2, engine: {engine}}}"
    with tree.serve(models, f"auth: {{admin_keys: [{KEY}], keys: [{KEY}-of-a-tenant]}}") as server:
        url = f"http://127.0.0.1:{server.port}"
        said = tree.run("top", "--once", "--interval", "0.1", "--url", url, "--key", KEY)[1]
    lines = said.splitlines()
    whole = all(any(line.lstrip().startswith(f"{name}-{n} ") for line in lines) for n in (0, 1))
    seen = f"{said.count('…')} cells are cut, workers' names whole: {whole}"
    return Seen(whole and "…" not in said and _width(said) <= WIDTH, seen)


def readme_python(tree: Tree) -> Seen:
    """README's Python works after the commands above it."""
    before, _, rest = (tree.root / "README.md").read_text().partition("```python\n")
    extras = tomllib.loads((tree.root / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    installed = " ".join(extras["engine"])  # The packages that `make serve` installs.
    if not re.search(r"pip install [^`]*\bopenai\b", before) and "openai" not in installed:
        return Seen(False, "nothing above it installs `openai`, which it imports")
    with tree.serve(f"  - {{path: {tree.model}, name: penstock-demo}}", f"auth: {{keys: [{KEY}]}}") as server:
        code = rest.partition("```")[0].replace("sk-...", KEY)
        script = tree.place / "readme.py"
        script.write_text(code.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}"))
        done = subprocess.run(
            [sys.executable, script], cwd=tree.place, capture_output=True, text=True, check=False,
            env=tree.environment(), timeout=PAGE_S,
        )  # fmt: skip
    last = (done.stderr.strip().splitlines() or ["it answers"])[-1]
    return Seen(done.returncode == 0 and bool(done.stdout.strip()), last[:100])


def page_asks(tree: Tree) -> Seen:
    """From another machine's address the page asks for a key."""
    browser = shutil.which("chromium")
    mine = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True).stdout.split()
    address = next((each for each in mine if ":" not in each), "")
    if browser is None or not address:
        raise RuntimeError("this takes a Chromium and an address that is not loopback")
    with tree.serve(more=f"auth: {{keys: [{KEY}]}}\nserver: {{host: 0.0.0.0}}") as server:
        done = subprocess.run(
            [browser, "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=6000",
             f"--user-data-dir={tree.place / 'browser'}", "--dump-dom", f"http://{address}:{server.port}/"],
            capture_output=True, text=True, check=False, timeout=PAGE_S,
            env={**os.environ, "HOME": str(tree.place)},
        )  # fmt: skip
    shown = re.sub(r"<dialog.*?</dialog>", "", done.stdout, flags=re.DOTALL)  # Closed: they are not seen.
    asks = re.search(r'<input[^>]*type="password"', shown) is not None
    dashes = len(re.findall(r">–<", shown))
    return Seen(asks, f"a field for a key: {asks}; {dashes} dashes")


OUTSIDE: tuple[tuple[str, Callable[[Tree], Seen]], ...] = (
    ("8", behind_proxy), ("10 operator", kv_quota), ("10 operator", usage_table),
    ("10 operator", top_table), ("10 operator", readme_python), ("10 operator", page_asks),
)  # fmt: skip
