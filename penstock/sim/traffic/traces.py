"""Recorded traffic: reads penstock-trace/1 as a source of the simulator.

penstock-trace/1 is JSON lines, plain or gzip'd. The first is a header with at least `format` and
`block_size`; every other line is a request, by arrival:

    arrival_s      seconds from the trace's start
    prompt_tokens  output_tokens
    blocks         the prompt's prefix chain, runs `[first, count]` of ids; equal ids are equal prefixes up to
                   there; may be absent
    session        conversation; may be absent
    tenant         client of the service; may be absent
"""

import gzip
import itertools
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock import rng
from penstock.clock import NS_PER_S
from penstock.errors import ConfigError
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.traffic.workload import Callers, LengthDistribution
from penstock.types import BLOCK_TOKENS

FORMAT = "penstock-trace/1"
BLOCK_SIZE_MAX = 65_536
PRIVATE = 1 << 39
"""Contents from here on are of requests without ids."""
EVERYBODY = Callers()
PROMPTS, ANSWERS = LengthDistribution(700, 1.0), LengthDistribution(250, 0.9, maximum=4096)


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The first line. Its other fields (source, licence, attribution) are for people."""

    format: str
    name: str = ""
    block_size: int = 0
    licence: str = ""
    attribution: str = ""
    requests: int = 0


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[tuple[int, int], ...] = ()
    session: str = ""
    tenant: str = ""


_header = msgspec.json.Decoder(TraceHeader)
_line = msgspec.json.Decoder(_Line)


@dataclass(slots=True, frozen=True, kw_only=True)
class Trace:
    """A recorded trace as a source; `speed` plays it faster or slower."""

    path: Path
    name: str = "trace"
    callers: Callers = EVERYBODY
    """The model, and the tenants of requests that name none."""
    speed: float = 1.0
    limit: int = 0
    """Requests at most; 0: all."""
    prompt_max: int = 0
    """Longer prompts are left out; 0: none. (A fleet that cannot hold them would only refuse.)"""

    def header(self) -> TraceHeader:
        """The first line.

        Raises:
            ConfigError: the file cannot be read, or is no trace.
        """
        first = next(_lines(self.path), b"")
        try:
            header = _header.decode(first)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self.path}: line 1 is no header of a {FORMAT} trace ({error})") from error
        if header.format != FORMAT:
            raise ConfigError(f"{self.path}: format is {header.format!r}, expected {FORMAT!r}")
        if not 0 <= header.block_size <= BLOCK_SIZE_MAX:
            raise ConfigError(
                f"{self.path}: block_size is {header.block_size}, expected 0 to {BLOCK_SIZE_MAX}"
            )
        return header

    def requests(self, seed: int, first: int, seconds: float) -> Iterator[SimRequest]:
        """See `Source`; contents are the trace's block ids, moved to `first`.

        Raises:
            ConfigError: a line is no request, or comes before the one above it.
        """
        header, last = self.header(), 0.0
        lines = itertools.islice(_lines(self.path), 1, None)
        taken = 0
        for number, line in enumerate(lines, 2):
            try:
                each = _line.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise ConfigError(f"{self.path}: line {number} is no request ({error})") from error
            if each.arrival_s < last or each.prompt_tokens < 1 or each.output_tokens < 0:
                raise ConfigError(
                    f"{self.path}: line {number}: not in order of time, or a length below its least"
                )
            last = each.arrival_s
            if last / self.speed >= seconds or (self.limit and taken >= self.limit):
                return
            if self.prompt_max and each.prompt_tokens > self.prompt_max:
                continue
            taken += 1
            yield self._request(number, each, header.block_size, first)

    def _request(self, number: int, line: _Line, block_size: int, first: int) -> SimRequest:
        tenant = line.tenant or self.callers.tenant(rng.stream(number, f"workload/{self.name}"))
        prompt = _segments(line, block_size, first) or (
            Segment(first + PRIVATE + number, line.prompt_tokens),
        )
        return self.callers.request(
            f"{self.name}-{number}", line.arrival_s / self.speed, prompt, max(1, line.output_tokens),
            tenant=tenant, session=line.session,
        )  # fmt: skip


def _segments(line: _Line, block_size: int, first: int) -> tuple[Segment, ...]:
    """A run of ids is one content, named by its first: an id has one predecessor, so all prompts cut at the
    same ids.
    """
    found: list[Segment] = []
    left = line.prompt_tokens if block_size else 0
    for start, count in line.blocks:
        if left < 1:
            break
        found.append(Segment(first + start + 1, min(left, count * block_size)))
        left -= count * block_size
    if left > 0 and found:  # More tokens than blocks: the rest belongs to the last.
        found[-1] = Segment(found[-1].content, found[-1].tokens + left)
    return tuple(found)


def write_trace(path: Path, name: str, requests: Iterable[SimRequest]) -> int:
    """Write requests as a trace that `Trace` reads; returns how many.

    Adapters and bands are not part of the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    ids: dict[tuple[object, ...], int] = {}
    lines = [msgspec.json.encode(_encoded(request, ids)) for request in requests]
    header = TraceHeader(format=FORMAT, name=name, block_size=BLOCK_TOKENS, requests=len(lines))
    content = b"".join([msgspec.json.encode(header), b"\n", *(line + b"\n" for line in lines)])
    try:
        path.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from error
    return len(lines)


def _encoded(request: SimRequest, ids: dict[tuple[object, ...], int]) -> _Line:
    """One line; `ids` names each block by the one before it and by what it holds."""
    runs: list[tuple[int, int]] = []
    block: list[tuple[int, int, int]] = []  # (content, start, end) of what is in the block so far.
    last, room = -1, BLOCK_TOKENS
    for number, (content, tokens) in enumerate((part.content, part.tokens) for part in request.prompt):
        start = 0
        while start < tokens:
            end = min(tokens, start + room)
            block.append((content, start, end))
            room -= end - start
            start = end
            if room and (start < tokens or number + 1 < len(request.prompt)):
                continue
            last = ids.setdefault((last, *block), len(ids))
            if runs and sum(runs[-1]) == last:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((last, 1))
            block, room = [], BLOCK_TOKENS
    return _Line(
        arrival_s=request.at_ns / NS_PER_S,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        blocks=tuple(runs),
        session=request.session,
        tenant=request.tenant,
    )


def _lines(path: Path) -> Iterator[bytes]:
    try:
        with path.open("rb") as raw:
            zipped = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            if zipped:
                with gzip.GzipFile(fileobj=raw) as plain:
                    yield from plain
            else:
                yield from raw
    except (OSError, EOFError, zlib.error) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
