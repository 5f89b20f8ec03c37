"""The machine's weight cache, and models from it. Where it is and how large are the machine's, not a
configuration's: every process of every server here shares it.

    PENSTOCK_CACHE          its directory; `~/.cache/penstock` (below `XDG_CACHE_HOME`)
    PENSTOCK_CACHE_BYTES    what it may hold, "200GiB"; without it as much as the disk has
"""

import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from penstock.errors import ConfigError
from penstock.weight_cache.cache import Tell, WeightCache, say_nothing
from penstock.weight_cache.hub import HubSource
from penstock.weight_cache.s3 import S3Source
from penstock.weight_cache.source import SourceUnreachable, check_listing

PLACE, BYTES = "PENSTOCK_CACHE", "PENSTOCK_CACHE_BYTES"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?B)?", re.IGNORECASE)


def machine_cache(*, tell: Tell = say_nothing, environ: Mapping[str, str] = os.environ) -> WeightCache:
    """The cache of this machine.

    Raises:
        ConfigError: an environment variable makes no sense.
    """
    place = environ.get(PLACE)
    if not place:
        home = environ.get("XDG_CACHE_HOME") or os.path.join(environ.get("HOME") or "/", ".cache")
        place = os.path.join(home, "penstock")
    return WeightCache(Path(place).expanduser(), _bytes(environ.get(BYTES, "")), tell=tell)


def fetched_from_hub(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """The directory with a repository's files, in our cache or in huggingface_hub's.

    Raises:
        SourceError: the hub does not give it.
        CheckpointError: it is damaged.
        ConfigError: there is no room for it.
    """
    source = HubSource(repo, revision, patterns)
    try:
        listing = source.listing()
    except SourceUnreachable:
        listing = None
    if listing is not None:
        check_listing(source.name, listing.files)
    if (elsewhere := source.found_elsewhere(listing)) is not None:
        return elsewhere
    return machine_cache(tell=Teller()).fetch(source)


def fetched_from_s3(url: str, patterns: Sequence[str], digest: str = "") -> Path:
    """The directory with the objects below a prefix.

    Raises:
        SourceError: the store does not give it.
        CheckpointError: it is damaged, or has another digest.
        ConfigError: there is no room for it.
    """
    return machine_cache(tell=Teller()).fetch(S3Source(url, patterns), digest)


class Teller:
    """Says on standard error what is fetched: every percent on a terminal, else every tenth."""

    def __init__(self) -> None:
        self._is_seen = sys.stderr.isatty()
        self._reported: tuple[str, int] = ("", -1)

    def __call__(self, what: str, done: int, total: int) -> None:
        """See `Tell`."""
        if not total:
            print(what, file=sys.stderr, flush=True)
            return
        step = 1 if self._is_seen else 10
        reported = (what, 100 * done // total // step)
        if reported == self._reported:
            return
        self._reported = reported
        ends = "\n" if done == total or not self._is_seen else "\r"
        print(f"{what}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB", end=ends, file=sys.stderr, flush=True)


def _bytes(text: str) -> int:
    if not text.strip():
        return 0
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (size := int(float(found[1]) * _UNITS[found[2].upper()])):
        raise ConfigError(f"{BYTES}: {text!r} is no size such as 200GiB")
    return size
