"""Which running streams end when KV memory is nearly full, so that the others can go on.

The lowest band gives way first, and in it whoever has the longest answer still before it: that one would take
the most memory from now on, and has the least to show for what it took. A protected band never gives way.
Pure.
"""

from collections.abc import Iterable

import msgspec


class RunningStream(msgspec.Struct, frozen=True, kw_only=True):
    """A stream that holds KV blocks of a worker."""

    id: str
    band_order: int
    """Smaller is more urgent, as `queue.bands[].order`."""
    is_protected: bool = False
    remaining_tokens: int
    """Answer tokens that are still expected."""
    blocks: int
    """KV blocks that only this stream holds: what ending it gives back."""


def blocks_to_free(used: int, total: int, *, above: float, to: float) -> int:
    """KV blocks that must become free: none up to the share `above`, else as many as bring the use down to
    `to`.

    The gap between the two keeps a worker at the bound from ending one stream after another.
    """
    assert 0 < to <= above <= 1
    return max(0, used - int(total * to)) if used > total * above else 0


def choose_victims(streams: Iterable[RunningStream], num_blocks: int, *, victims_max: int) -> tuple[str, ...]:
    """The ids of the streams to end, in order, until `num_blocks` are free or nobody is left who may be
    ended.

    Ties end by id, so that the choice does not depend on the order of the streams.
    """
    if num_blocks <= 0:
        return ()
    may_end = [stream for stream in streams if not stream.is_protected and stream.blocks > 0]
    may_end.sort(key=lambda stream: (-stream.band_order, -stream.remaining_tokens, stream.id))
    chosen: list[str] = []
    for stream in may_end[:victims_max]:
        if num_blocks <= 0:
            break
        chosen.append(stream.id)
        num_blocks -= stream.blocks
    return tuple(chosen)
