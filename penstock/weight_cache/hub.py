"""The Hugging Face hub, by its HTTP API: a repository's files at a commit, each with its digest.

`HF_ENDPOINT`, `HF_TOKEN`, `HF_HOME` and `HF_HUB_OFFLINE` mean what they mean to others. The content of their
cache (`~/.cache/huggingface/hub`) is used where it lies. Only HTTP is fetched, keys go to the host that they
are for, and trouble has a type.
"""

import contextlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote, urlsplit

import msgspec

from penstock.weight_cache.source import (
    Digest,
    Listing,
    RemoteFile,
    SourceError,
    SourceUnreachable,
    is_wanted,
)

TIMEOUT_S = 30.0
"""Without a byte."""
_LATER = frozenset({408, 425, 429, 500, 502, 503, 504})


class _Redirects(urllib.request.HTTPRedirectHandler):
    """The hub sends to where the bytes lie: without the key, and never to a file or from HTTPS to HTTP."""

    def redirect_request(self, req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:  # noqa: ANN401
        old, new = urlsplit(str(req.full_url)), urlsplit(newurl)
        if new.scheme not in ("http", "https") or (old.scheme == "https" and new.scheme != "https"):
            raise urllib.error.URLError(f"it redirects to {newurl[:128]}")
        found = super().redirect_request(req, fp, code, msg, headers, newurl)
        if found is not None and old.netloc != new.netloc:
            found.remove_header("Authorization")
        return found


@contextlib.contextmanager
def get(url: str, headers: dict[str, str]) -> Generator[http.client.HTTPResponse]:
    """The answer to a GET.

    Raises:
        SourceError: the server says no.
        SourceUnreachable: no server answers, or the server asks to come back.
    """
    request = urllib.request.Request(url, headers=headers)
    try:
        response: http.client.HTTPResponse = urllib.request.build_opener(_Redirects).open(
            request, timeout=TIMEOUT_S
        )
    except urllib.error.HTTPError as error:
        with error:
            if error.code in _LATER:
                raise SourceUnreachable(
                    f"HTTP {error.code} {error.reason}",
                    retry_after_s=_seconds(error.headers.get("Retry-After")),
                ) from error
            raise SourceError(f"HTTP {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", error)
        raise SourceUnreachable(f"{urlsplit(url).netloc}: {reason}") from error
    with response:
        yield response


def _seconds(header: str | None) -> float:
    return float(header) if header and header.isdigit() else 0.0


ENDPOINT = "https://huggingface.co"
LISTING_BYTES_MAX = 32 << 20
_PARTIAL = 206


class _Lfs(msgspec.Struct):
    sha256: str
    size: int


class _HubFile(msgspec.Struct):
    rfilename: str
    size: int = -1
    blob: str = msgspec.field(name="blobId", default="")
    lfs: _Lfs | None = None


class _Repository(msgspec.Struct):
    sha: str
    files: tuple[_HubFile, ...] = msgspec.field(name="siblings", default=())


class HubSource:
    """A repository at a revision, and of it the files that match."""

    def __init__(
        self,
        repo: str,
        revision: str | None,
        patterns: Sequence[str],
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        self.name = repo if revision is None else f"{repo}@{revision}"
        self._repo, self._revision, self._patterns = repo, revision or "main", tuple(patterns)
        self._endpoint = environ.get("HF_ENDPOINT", "").rstrip("/") or ENDPOINT
        self._home = Path(environ.get("HF_HOME") or Path(environ.get("HOME", "/")) / ".cache" / "huggingface")
        self._their_cache = Path(environ.get("HF_HUB_CACHE") or self._home / "hub")
        self._token = environ.get("HF_TOKEN") or _stored(environ.get("HF_TOKEN_PATH") or self._home / "token")
        self._is_offline = environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on")
        self._found: Listing | None = None

    def listing(self) -> Listing:
        """See `Source`. Asked once, so that all files are of one commit."""
        if self._found is None:
            self._found = self._listing()
        return self._found

    def _listing(self) -> Listing:
        if self._is_offline:
            raise SourceUnreachable("HF_HUB_OFFLINE is set")
        url = f"{self._endpoint}/api/models/{self._repo}/revision/{quote(self._revision, safe='')}?blobs=true"
        try:
            with get(url, self._headers()) as answer:
                body = answer.read(LISTING_BYTES_MAX + 1)
        except OSError as error:
            raise SourceUnreachable(str(error)) from error
        except SourceError as error:
            raise self._explained(error) from error
        try:
            found = msgspec.json.decode(body, type=_Repository)
        except (msgspec.DecodeError, msgspec.ValidationError) as error:
            raise SourceError(f"its list of files cannot be read: {error}") from error
        if not found.sha.isalnum():
            raise SourceError(f"its commit is called {found.sha[:64]!r}")
        return Listing(
            found.sha, tuple(_file(each) for each in found.files if self._is_wanted(each.rfilename))
        )

    @contextlib.contextmanager
    def open(self, file: RemoteFile, offset: int) -> Generator[tuple[IO[bytes], int]]:
        """See `Source`."""
        commit = self.listing().version
        url = f"{self._endpoint}/{self._repo}/resolve/{commit}/{quote(file.name)}"
        headers = self._headers() | ({"Range": f"bytes={offset}-"} if offset else {})
        with get(url, headers) as answer:
            yield answer, offset if answer.status == _PARTIAL else 0

    def found_elsewhere(self, listing: Listing | None) -> Path | None:
        """Where huggingface_hub's cache has all of the files; without a listing, of the commit that it knew
        last.
        """
        place = self._their_cache / f"models--{self._repo.replace('/', '--')}"
        try:
            commit = listing.version if listing else (place / "refs" / self._revision).read_text().strip()
            snapshot = place / "snapshots" / commit
            if not commit.isalnum() or not snapshot.is_dir():
                return None
            if listing is None:
                return snapshot
            sizes = ((snapshot / file.name).stat().st_size == file.size for file in listing.files)
            return snapshot if all(sizes) else None
        except OSError:
            return None

    def _is_wanted(self, name: str) -> bool:
        return is_wanted(name, self._patterns)

    def _headers(self) -> dict[str, str]:
        return {"User-Agent": "penstock"} | (
            {"Authorization": f"Bearer {self._token}"} if self._token else {}
        )

    def _explained(self, error: SourceError) -> SourceError:
        if isinstance(error, SourceUnreachable) or "HTTP 40" not in str(error):
            return error
        key = (
            "is the key in HF_TOKEN allowed to read it?"
            if self._token
            else "if it is private or gated, set HF_TOKEN"
        )
        return SourceError(f"{error}: no such repository or revision; {key}")


def _file(hub_file: _HubFile) -> RemoteFile:
    if hub_file.lfs is not None:
        return RemoteFile(
            hub_file.rfilename, hub_file.lfs.size, Digest("sha256", hub_file.lfs.sha256.lower())
        )
    digest = Digest("git-sha1", hub_file.blob.lower()) if hub_file.blob else None
    return RemoteFile(hub_file.rfilename, hub_file.size, digest)


def _stored(path: str | Path) -> str:
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
