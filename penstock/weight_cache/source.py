"""A place that models come from, as the cache sees it: a list of files, and bytes of each from an offset."""

import contextlib
import fnmatch
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import IO, Any, Literal, Protocol

from penstock.errors import CheckpointError

FILES_MAX = 10_000
NAME_CHARS_MAX = 512
Algorithm = Literal["sha256", "git-sha1", "md5"]


class SourceError(Exception):
    """The source does not give what was asked for; the message says why."""


class SourceUnreachable(SourceError):
    """It may give it later: the network, or the server behind it, is in trouble."""

    def __init__(self, message: str, *, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(slots=True, frozen=True)
class Digest:
    """The hash of a file's bytes, by the source's own word."""

    algorithm: Algorithm
    hex: str

    def begin(self, size: int) -> Any:  # noqa: ANN401 - hashlib names no type.
        """A hash to feed the file to, which has `size` bytes."""
        if self.algorithm != "git-sha1":
            return hashlib.new(self.algorithm, usedforsecurity=False)
        found = hashlib.sha1(usedforsecurity=False)
        found.update(b"blob %d\0" % size)  # As git names the contents of a file.
        return found


@dataclass(slots=True, frozen=True)
class RemoteFile:
    """One file of a model."""

    name: str
    """Below the model, with `/` between folders."""
    size: int
    digest: Digest | None
    """None: the source has none."""


@dataclass(slots=True, frozen=True)
class Listing:
    """A model's files as they are now."""

    version: str
    """Changes when a file does: a commit, or a hash over all that is known of the files."""
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(file.size for file in self.files)


def is_wanted(name: str, patterns: Sequence[str]) -> bool:
    """Whether a file matches one of the patterns, and none of those that have `!` in front."""
    without = [pattern[1:] for pattern in patterns if pattern.startswith("!")]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns) and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in without
    )


class Source(Protocol):
    """One model somewhere else."""

    name: str
    """As people write it, with the revision that was asked for."""

    def listing(self) -> Listing:
        """Its files.

        Raises:
            SourceError: there is no such model, or it is not ours to read.
            SourceUnreachable: no server answered.
        """
        ...

    def open(
        self, file: RemoteFile, offset: int
    ) -> "contextlib.AbstractContextManager[tuple[IO[bytes], int]]":
        """The file's bytes from `offset` on, and where they really begin: 0 where the source cannot skip.

        Raises:
            SourceError: it is not there any more.
            SourceUnreachable: no server answered.
        """
        ...


def check_listing(name: str, files: tuple[RemoteFile, ...]) -> None:
    """Refuse file names that could be written anywhere but below the model's directory.

    Raises:
        CheckpointError: naming the file.
    """
    if len(files) > FILES_MAX:
        raise CheckpointError(f"{name}: lists {len(files)} files; at most {FILES_MAX} are taken")
    for file in files:
        path = PurePosixPath(file.name)
        is_bad = path.is_absolute() or ".." in path.parts or "\\" in file.name or "\0" in file.name
        if is_bad or not path.parts or path.parts[0].startswith(".") or len(file.name) > NAME_CHARS_MAX:
            raise CheckpointError(f"{name}: lists {file.name[:128]!r}, which is no name below the model")
        if file.size < 0:
            raise CheckpointError(f"{name}: {file.name} has {file.size} bytes, by its own word")
