"""Brings an adapter's files to this machine: a directory, `http(s)://` or `s3://`.

    /srv/lora/fr, file:///srv/lora/fr        as it is
    https://host/lora/fr                     the two files below it
    https://host/lora/fr.zip, .tar, .tar.gz  an archive that holds them; a query (a signature) stays behind it
    s3://bucket/lora/fr                      the two objects below the prefix; needs the extra `s3`

Blocking: for a thread of its own. A fetched file is bounded, and written under names of ours alone.
"""

import contextlib
import hashlib
import http.client
import importlib
import os
import shutil
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Generator, Iterator
from pathlib import Path, PurePosixPath
from typing import IO, Any, cast
from urllib.parse import urlsplit

from penstock.clock import NS_PER_S, Clock, SystemClock
from penstock.errors import CheckpointError
from penstock.models.adapters import CONFIG_BYTES_MAX, CONFIG_FILE, FILE_BYTES_MAX, WEIGHTS_FILE
from penstock.protocol.worker_parts import public

TIMEOUT_S = 30.0
"""Without a byte."""
FETCH_S_MAX = 900.0
"""For one file: a source that gives a byte now and then would keep all others of the worker waiting."""
MEMBERS_MAX = 1000
_CHUNK = 1 << 20
_PREFIX = "penstock-adapters-"
_BOUNDS = {CONFIG_FILE: CONFIG_BYTES_MAX, WEIGHTS_FILE: FILE_BYTES_MAX}
_ZIP, _TAR = (".zip",), (".tar", ".tar.gz", ".tgz")

Open = Callable[[], "contextlib.AbstractContextManager[IO[bytes]]"]


class AdapterFetcher:
    """Keeps what it has fetched in a directory of its own until it is closed."""

    def __init__(self, cache: Path | None = None, *, clock: Clock | None = None) -> None:
        """`cache`: where to keep it; None: in a temporary directory."""
        self._cache, self._is_ours, self._clock = cache, cache is None, clock or SystemClock()

    def fetch(self, path: str, *, again: bool = False) -> Path:
        """The directory in which the adapter's files are now.

        `again`: a copy of it that was made before will do.

        Raises:
            CheckpointError: it cannot be had from there; the message names the file.
        """
        try:
            at = urlsplit(path)
            scheme = at.scheme.lower()
            if scheme in ("", "file"):
                return Path(at.path if scheme else path).expanduser()
        except (ValueError, RuntimeError) as error:
            raise CheckpointError(public(path, f"{path}: no path or address: {error}")) from error
        if scheme not in ("http", "https", "s3"):
            raise CheckpointError(public(path, f"{path}: expected a directory, http://, https:// or s3://"))
        if self._cache is None:
            _sweep()
            self._cache = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        target = self._cache / hashlib.blake2b(path.encode(), digest_size=16).hexdigest()
        if again and target.is_dir():
            return target
        fresh = target.with_suffix(".new")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        try:
            if scheme == "s3":
                _from_s3(path, fresh, self._clock)
            elif at.path.lower().endswith(_ZIP + _TAR):
                _from_archive(path, fresh, self._clock)
            else:
                for name in _BOUNDS:
                    url = at._replace(path=f"{at.path.rstrip('/')}/{name}").geturl()
                    _write(lambda url=url: _opened(url), fresh / name, url, self._clock)
        except CheckpointError as error:
            shutil.rmtree(fresh, ignore_errors=True)
            raise CheckpointError(public(path, str(error))) from error
        except BaseException:
            shutil.rmtree(fresh, ignore_errors=True)
            raise
        shutil.rmtree(target, ignore_errors=True)
        os.replace(fresh, target)
        return target

    def close(self) -> None:
        """Forget what was fetched."""
        if self._cache is not None and self._is_ours:
            shutil.rmtree(self._cache, ignore_errors=True)


def _sweep() -> None:
    """Remove what processes of this user left behind that were killed."""
    for path in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = path.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if pid.isdigit() and path.stat().st_uid == os.getuid() and not Path(f"/proc/{pid}").exists():
                shutil.rmtree(path, ignore_errors=True)


def _write(source: Open, target: Path, what: str, clock: Clock) -> None:
    """Copy what `source` opens to `target`, up to the bound of a file of its name."""
    bound, size = _BOUNDS.get(target.name, FILE_BYTES_MAX + CONFIG_BYTES_MAX), 0
    until_ns = clock.now_ns() + int(FETCH_S_MAX * NS_PER_S)
    try:
        with source() as stream, target.open("wb") as file:
            read = getattr(stream, "read1", stream.read)  # `read` waits until it has a whole chunk.
            while chunk := read(_CHUNK):
                size += len(chunk)
                if size > bound:
                    raise CheckpointError(f"{what}: has more than {bound} bytes")
                if clock.now_ns() > until_ns:
                    raise CheckpointError(f"{what}: has not come whole in {FETCH_S_MAX:g} s")
                file.write(chunk)
    except (
        OSError,
        ValueError,
        EOFError,
        http.client.HTTPException,
        zipfile.BadZipFile,
        tarfile.TarError,
    ) as error:
        raise CheckpointError(f"{what}: cannot be read: {error}") from error


class _OnlyHttp(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: ANN401
        if urlsplit(newurl).scheme not in ("http", "https"):
            raise urllib.error.URLError(f"it redirects to {newurl[:128]}")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@contextlib.contextmanager
def _opened(url: str) -> Generator[IO[bytes]]:
    opener = urllib.request.build_opener(_OnlyHttp)
    with opener.open(url, timeout=TIMEOUT_S) as response:
        yield response


def _from_archive(url: str, target: Path, clock: Clock) -> None:
    archive = target / "archive"
    _write(lambda: _opened(url), archive, url, clock)
    try:
        if urlsplit(url).path.lower().endswith(_ZIP):
            with zipfile.ZipFile(archive) as found:
                members = {
                    each.filename: each for each in found.infolist() if not each.filename.endswith("/")
                }
                for name, member in _wanted(url, list(members)).items():
                    info = members[member]
                    _write(lambda info=info: found.open(info), target / name, f"{url}: {member}", clock)
        else:
            with tarfile.open(archive) as found:
                files = {each.name: each for each in _bounded(url, found)}
                for name, member in _wanted(url, list(files)).items():
                    stream = found.extractfile(files[member])
                    if stream is None:
                        raise CheckpointError(f"{url}: {member} is no file")
                    _write(lambda stream=stream: stream, target / name, f"{url}: {member}", clock)
    except (OSError, EOFError, zipfile.BadZipFile, tarfile.TarError, NotImplementedError) as error:
        raise CheckpointError(f"{url}: not a whole archive: {error}") from error
    archive.unlink()


def _bounded(url: str, archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Its files. The bytes between two names are unpacked to find the second one, so all have a bound."""
    size = 0
    for i, member in enumerate(archive):
        if i >= MEMBERS_MAX:
            raise CheckpointError(f"{url}: has more than {MEMBERS_MAX} members")
        size += member.size
        if size > FILE_BYTES_MAX + CONFIG_BYTES_MAX:
            raise CheckpointError(f"{url}: holds more than {FILE_BYTES_MAX + CONFIG_BYTES_MAX} bytes")
        if member.isdir():
            continue
        if not member.isreg():
            raise CheckpointError(f"{url}: {member.name[:128]!r} is a link or a device, expected a file")
        yield member


def _wanted(url: str, members: list[str]) -> dict[str, str]:
    """The members that are an adapter's files, which lie in one directory.

    A name that leads out of the archive gives it all away, also where nothing would be written under it.
    """
    if len(members) > MEMBERS_MAX:
        raise CheckpointError(f"{url}: has more than {MEMBERS_MAX} members")
    found: dict[str, str] = {}
    for member in members:
        path = PurePosixPath(member.replace("\\", "/"))
        if path.is_absolute() or not path.parts or ".." in path.parts or ":" in path.parts[0]:
            raise CheckpointError(f"{url}: {member[:128]!r} leads out of the archive")
        if path.name in _BOUNDS:
            if path.name in found:
                raise CheckpointError(f"{url}: has more than one {path.name}")
            found[path.name] = member
    for name in _BOUNDS:
        if name not in found:
            raise CheckpointError(f"{url}: has no {name}")
    return found


def _from_s3(path: str, target: Path, clock: Clock) -> None:
    try:
        boto3 = cast(Any, importlib.import_module("boto3"))
        errors = cast(Any, importlib.import_module("botocore.exceptions"))
    except ImportError as error:
        raise CheckpointError(f"{path}: needs the extra `s3` (pip install 'penstock[s3]')") from error
    at = urlsplit(path)
    prefix = at.path.strip("/")
    try:
        client = boto3.client("s3")  # Credentials, region and endpoint from the environment.
        for name in _BOUNDS:
            key = f"{prefix}/{name}" if prefix else name
            body = client.get_object(Bucket=at.netloc, Key=key)["Body"]
            _write(
                lambda body=body: contextlib.closing(body), target / name, f"s3://{at.netloc}/{key}", clock
            )
    except (errors.BotoCoreError, errors.ClientError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
