"""The Hugging Face hub's HTTP API over files of a test, on loopback, as far as penstock and huggingface_hub
ask for it.

Large files are LFS, behind a redirect to another host, as the real one does it. Connections break where the
test says.
"""

import contextlib
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from urllib.parse import unquote, urlsplit

LFS_BYTES = 1000
"""Files of this size or more are LFS."""


class LoopbackHub:
    """One repository `owner/name` with one commit."""

    def __init__(self, files: dict[str, bytes], *, token: str = "") -> None:
        self.files, self.token = dict(files), token
        self.commit = "c0ffee" + "0" * 34
        self.asked: list[str] = []
        """Paths of files, with the range that was asked for."""
        self.keys: list[tuple[str, str]] = []
        """(path, Authorization) of every request."""
        self.breaks_after: dict[str, int] = {}
        """Bytes of a file behind which the connection breaks, once."""
        self.lies: dict[str, bytes] = {}
        """What is sent in place of a file, of the same length."""
        self.takes_ranges = True
        self.fails = 0
        """So many answers are 503."""
        self.held = threading.Event()
        self.held.set()
        """Files wait while it is not set."""
        self.url = ""

    def listed(self) -> list[dict[str, object]]:
        found: list[dict[str, object]] = []
        for name, data in self.files.items():
            each: dict[str, object] = {
                "rfilename": name, "size": len(data),
                "blobId": hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest(),
            }  # fmt: skip
            if len(data) >= LFS_BYTES:
                each["blobId"] = hashlib.sha1(data).hexdigest()  # Of the pointer, on the real one.
                each["lfs"] = {
                    "sha256": hashlib.sha256(data).hexdigest(),
                    "size": len(data),
                    "pointerSize": 134,
                }
            found.append(each)
        return found


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: LoopbackHub

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.keys.append((path, self.headers.get("Authorization", "")))
        if hub.fails:
            hub.fails -= 1
            return self._answer(503, b"", {"Retry-After": "0"})
        is_file = path.startswith("/cdn/")
        if hub.token and not is_file and self.headers.get("Authorization") != f"Bearer {hub.token}":
            return self._answer(401, b"no")
        if path.startswith("/api/models/owner/name/revision/") and path.rpartition("/")[2] in (
            "main",
            hub.commit,
        ):
            body = {"id": "owner/name", "sha": hub.commit, "siblings": hub.listed()}
            return self._answer(200, json.dumps(body).encode())
        if path == f"/api/models/owner/name/tree/{hub.commit}":
            return self._answer(200, json.dumps([_in_tree(each) for each in hub.listed()]).encode())
        resolve = f"/owner/name/resolve/{hub.commit}/"
        if path.startswith(resolve) and (name := path.removeprefix(resolve)) in hub.files:
            data = hub.files[name]
            headers = {"X-Repo-Commit": hub.commit, "ETag": f'"{hashlib.sha1(data).hexdigest()}"'}
            if len(data) < LFS_BYTES:
                return self._file(name, headers)
            headers |= {
                "X-Linked-Size": str(len(data)),
                "X-Linked-ETag": f'"{hashlib.sha256(data).hexdigest()}"',
            }
            other = hub.url.replace("127.0.0.1", "localhost")
            return self._answer(302, b"", headers | {"Location": f"{other}/cdn/{name}?X-Signature=1"})
        if is_file and (name := path.removeprefix("/cdn/")) in hub.files:
            return self._file(name, {"ETag": '"x"'})
        return self._answer(404, b"{}")

    def _file(self, name: str, headers: dict[str, str]) -> None:
        hub, wanted = self.hub, self.headers.get("Range", "")
        data = hub.lies.get(name, hub.files[name])
        if self.command == "GET":
            hub.asked.append(f"{name} {wanted}".strip())
            hub.held.wait(20)
        start = int(wanted.removeprefix("bytes=").rstrip("-") or 0) if wanted and hub.takes_ranges else 0
        headers |= {"Accept-Ranges": "bytes"}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        after = hub.breaks_after.pop(name, None) if self.command == "GET" else None
        self._answer(206 if start else 200, data[start:], headers, after)

    def _answer(
        self, status: int, body: bytes, headers: dict[str, str] | None = None, breaks_after: int | None = None
    ) -> None:
        self.send_response(status)
        for key, value in (headers or {}).items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if breaks_after is not None:
            body, self.close_connection = body[:breaks_after], True
        with contextlib.suppress(OSError):  # Whoever asked may have gone.
            self.wfile.write(body)


def _in_tree(listed: dict[str, object]) -> dict[str, object]:
    """A file as the hub's other list of a repository has it."""
    found = {"type": "file", "path": listed["rfilename"], "size": listed["size"], "oid": listed["blobId"]}
    lfs = listed.get("lfs")
    if isinstance(lfs, dict):
        found["lfs"] = {"oid": lfs["sha256"], "size": lfs["size"], "pointerSize": 134}
    return found


@contextlib.contextmanager
def loopback_hub(files: dict[str, bytes], *, token: str = "") -> Iterator[LoopbackHub]:
    hub = LoopbackHub(files, token=token)
    handler = type("Bound", (Handler,), {"hub": hub})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        hub.held.set()
        server.shutdown()
        thread.join()
        server.server_close()
