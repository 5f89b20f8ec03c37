"""Adapters over HTTP and from a real S3 server; hostile archives."""

import contextlib
import http.server
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from penstock.engine.adapters import fetch
from penstock.engine.adapters.fetch import AdapterFetcher
from penstock.errors import CheckpointError

FILES = {"adapter_config.json": b'{"r": 1}', "adapter_model.safetensors": b"w" * 1000}


class Handler(http.server.SimpleHTTPRequestHandler):
    dripped = threading.Event()
    """Never set."""

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        """Says nothing."""

    def do_GET(self) -> None:
        if self.path.startswith("/away"):
            self.send_response(302)
            self.send_header("Location", "file:///etc/passwd")
            self.end_headers()
            return
        if self.path.startswith("/drip"):
            self.send_response(200)
            self.end_headers()
            with contextlib.suppress(OSError):  # Whoever asked has had enough.
                while True:
                    self.wfile.write(b" ")
                    self.dripped.wait(0.01)
        super().do_GET()


@pytest.fixture
def web(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """A server's address, and the directory that it serves."""
    place = tmp_path / "web"
    (place / "fr").mkdir(parents=True)
    for name, content in FILES.items():
        (place / "fr" / name).write_bytes(content)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(place)))
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", place
    server.shutdown()
    thread.join()
    server.server_close()


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def write_zip(path: Path, members: dict[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def write_tar(path: Path, members: dict[str, bytes], link: str = "") -> None:
    with tarfile.open(path, "w:gz") as archive:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
        if link:
            info = tarfile.TarInfo("x")
            info.type, info.linkname = tarfile.SYMTYPE, link
            archive.addfile(info)


def test_a_directory_is_what_it_is(tmp_path: Path) -> None:
    fetcher = AdapterFetcher()
    assert fetcher.fetch(str(tmp_path)) == tmp_path
    assert fetcher.fetch(f"file://{tmp_path}") == tmp_path
    with pytest.raises(CheckpointError, match=r"expected a directory, http://, https:// or s3://"):
        fetcher.fetch("ftp://host/fr")


def test_over_http(web: tuple[str, Path]) -> None:
    url, place = web
    fetcher = AdapterFetcher(place / "cache")
    found = fetcher.fetch(f"{url}/fr/")
    assert content(found) == FILES
    (place / "fr" / "adapter_config.json").write_bytes(b"{}")
    assert content(fetcher.fetch(f"{url}/fr/", again=True)) == FILES
    assert content(fetcher.fetch(f"{url}/fr/"))["adapter_config.json"] == b"{}"
    with pytest.raises(CheckpointError, match=r"de/adapter_config.json: cannot be read: HTTP Error 404"):
        fetcher.fetch(f"{url}/de")
    with pytest.raises(CheckpointError, match=r"cannot be read"):
        fetcher.fetch(f"{url}/away")


def test_a_source_that_drips_holds_nobody_up_for_ever(
    web: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "FETCH_S_MAX", 0.1)
    with pytest.raises(CheckpointError, match=r"drip/adapter_config.json: has not come whole in 0.1 s"):
        AdapterFetcher(web[1] / "cache").fetch(f"{web[0]}/drip")


def test_a_signature_stays_behind_the_path(web: tuple[str, Path]) -> None:
    """As addresses that an object store has signed have one."""
    url, place = web
    write_zip(place / "fr.zip", FILES)
    for path in ("fr?X-Signature=a/b.zip", "fr/?x=1", "fr.zip?X-Signature=5f0c"):
        assert content(AdapterFetcher(place / "c").fetch(f"{url}/{path}")) == FILES


@pytest.mark.parametrize("name", ["no.zip?X-Signature=5f0c", "no?X-Signature=5f0c"])
def test_a_signature_and_a_password_are_in_no_message(web: tuple[str, Path], name: str) -> None:
    url = web[0].replace("://", "://me:secret@")
    with pytest.raises(CheckpointError) as refused:
        AdapterFetcher(web[1] / "c").fetch(f"{url}/{name}")
    assert "5f0c" not in str(refused.value)
    assert "secret" not in str(refused.value)
    assert "cannot be read" in str(refused.value)


@pytest.mark.parametrize(
    "path",
    [
        "http://me:s3cret@nohost.invalid/fr.zip?sig=a5bc",
        "http://me:s3%63ret@nohost.invalid/fr?sig=a5bc",
        "http://me:s3cret@[::1/fr?sig=a5bc",
        "http://me:s3cret@ho\u2100st/fr?sig=a5bc",
        f"http://me:s3cret@{'x' * 70}:80/fr?sig=a5bc",
        "ftp://me:s3cret@host/fr?sig=a5bc",
    ],
)
def test_a_secret_is_in_no_message_where_no_address_can_be_read(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError) as refused:
        AdapterFetcher(tmp_path).fetch(path)
    assert "a5bc" not in str(refused.value)
    assert "ret" not in str(refused.value).replace("directory", "")


@pytest.mark.parametrize("path", ["http://[::1/fr", "http://127.0.0.1:x/fr", "~no-such-user-here/fr"])
def test_what_is_no_address_is_said_to_be_none(tmp_path: Path, path: str) -> None:
    with pytest.raises(CheckpointError, match=r"no path or address|cannot be read"):
        AdapterFetcher(tmp_path).fetch(path)


def test_archives(web: tuple[str, Path]) -> None:
    url, place = web
    inside = {f"fr/{name}": data for name, data in FILES.items()} | {"fr/README.md": b"?"}
    write_zip(place / "fr.zip", inside)
    write_tar(place / "fr.tar.gz", inside)
    for name in ("fr.zip", "fr.tar.gz"):
        assert content(AdapterFetcher(place / "c").fetch(f"{url}/{name}")) == FILES


@pytest.mark.parametrize("name", ["../adapter_config.json", "/etc/x", "a/../../x", "..\\x", "C:/x", "."])
@pytest.mark.parametrize("kind", ["x.zip", "x.tar.gz"])
def test_names_that_lead_out(web: tuple[str, Path], name: str, kind: str) -> None:
    url, place = web
    (write_zip if kind == "x.zip" else write_tar)(place / kind, FILES | {name: b"x"})
    with pytest.raises(CheckpointError, match=r"leads out of the archive"):
        AdapterFetcher(place / "c").fetch(f"{url}/{kind}")


def test_archives_that_are_refused(web: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    url, place = web
    fetcher = AdapterFetcher(place / "cache")
    write_tar(place / "link.tar.gz", FILES, link="/etc/passwd")
    with pytest.raises(CheckpointError, match=r"'x' is a link or a device"):
        fetcher.fetch(f"{url}/link.tar.gz")
    write_zip(place / "two.zip", {**FILES, "b/adapter_config.json": b""})
    with pytest.raises(CheckpointError, match=r"more than one adapter_config.json"):
        fetcher.fetch(f"{url}/two.zip")
    write_zip(place / "none.zip", {"adapter_config.json": b""})
    with pytest.raises(CheckpointError, match=r"has no adapter_model.safetensors"):
        fetcher.fetch(f"{url}/none.zip")
    write_zip(place / "many.zip", {f"{i}": b"" for i in range(1001)})
    with pytest.raises(CheckpointError, match=r"more than 1000 members"):
        fetcher.fetch(f"{url}/many.zip")
    (place / "broken.zip").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"not a whole archive"):
        fetcher.fetch(f"{url}/broken.zip")
    write_zip(place / "bomb.zip", {**FILES, "adapter_config.json": b" " * (1 << 21)})
    with pytest.raises(CheckpointError, match=r"adapter_config.json: has more than 1048576 bytes"):
        fetcher.fetch(f"{url}/bomb.zip")
    monkeypatch.setattr(fetch, "FILE_BYTES_MAX", 1 << 20)
    write_tar(place / "bomb.tar.gz", {f"{i}": b" " * (1 << 19) for i in range(5)} | FILES)
    with pytest.raises(CheckpointError, match=r"bomb.tar.gz: holds more than 2097152 bytes"):
        fetcher.fetch(f"{url}/bomb.tar.gz")
    monkeypatch.setitem(fetch._BOUNDS, "adapter_model.safetensors", 999)  # pyright: ignore[reportPrivateUsage]
    with pytest.raises(CheckpointError, match=r"adapter_model.safetensors: has more than 999 bytes"):
        fetcher.fetch(f"{url}/fr")


def test_from_s3(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    boto3 = pytest.importorskip("boto3", reason="boto3 is not installed")
    moto = pytest.importorskip("moto.server", reason="moto is not installed")
    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    try:
        client, fetcher = boto3.client("s3"), AdapterFetcher(tmp_path)
        client.create_bucket(Bucket="models")
        for name, data in FILES.items():
            client.put_object(Bucket="models", Key=f"lora/fr/{name}", Body=data)
        assert content(fetcher.fetch("s3://models/lora/fr")) == FILES
        with pytest.raises(CheckpointError, match=r"s3://models/de: cannot be read: .*NoSuchKey"):
            fetcher.fetch("s3://models/de")
        client.close()
    finally:
        server.stop()


def test_what_was_fetched_goes_with_the_process(
    web: tuple[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / f"penstock-adapters-{2**22 + 1}-x"  # Of no process: over Linux's largest number.
    left.mkdir()
    fetcher = AdapterFetcher()
    found = fetcher.fetch(f"{web[0]}/fr")
    assert content(found) == FILES
    assert not left.exists()
    fetcher.close()
    assert not found.parent.exists()
