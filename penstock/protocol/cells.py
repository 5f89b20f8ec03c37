"""Messages of peer cells beyond those of a gateway and a worker: to its peers a cell is one worker
of each of its models, on the same wire (protocol/worker.py), behind the same handshake.

    gateway                               peer cell
       |  OpenCell -->                      |   which model this connection is about, and who asks
       |  <-- Ready | Loading               |   whether it takes requests, on every change; Stats on a timer
       |  Submit (with a `Guest`) -->       |   a request, with what its cell knows of it
       |  CellPing -->                      |   now and then
       |  <-- CellReport                    |   at once: the round trip, and what waits there

A guest is queued and placed there like any other request. Its caller, its limits and its price were settled
where it came from, and are not asked again. It is never sent on: `Guest.hops` counts the cells that it has
left, and more than one is refused.
"""

import msgspec

HOPS_MAX = 1
"""Cells that a request may leave: its own."""


class OpenCell(msgspec.Struct, frozen=True, kw_only=True, tag="open_cell"):
    """The first word on a connection."""

    cell: str
    """The cell that asks."""
    model: str
    tokenizer: str = ""
    """The mark of its tokenizer, so that both read tokens alike."""


class CellPing(msgspec.Struct, frozen=True, tag="cell_ping"):
    """Asks for a `CellReport`."""

    sent_ns: int
    """By the clock of whoever asks, who is told it back."""


class CellReport(msgspec.Struct, frozen=True, kw_only=True, tag="cell_report"):
    """How the cell stands for a request of this model that comes now."""

    sent_ns: int
    """Of the `CellPing`."""
    wait_ns: int = 0
    """Its wait for a worker there, as far as is known."""
    num_ready: int = 0
    """Workers there that take requests."""


class Guest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The facts of a request, said by the cell that it came to. Limits, budget and price stay there."""

    request_id: str
    """There, and in both ledgers."""
    hops: int = 1
    tenant: str = ""
    tier: str = ""
    band: str = ""
    session: str = ""
    user: str = ""
    endpoint: str = "chat"
    max_wait_ns: int = 0
    """The rest of the time that it may wait; 0: as long as its band's requests may."""
    first_token_ns: int = 0
    """The rest of the time in which its client wants the first token; 0: it says nothing."""
    context_tokens: int = 0
    needs: tuple[str, ...] = ()
    """Capabilities, those among them that say where it may be computed."""
    trace: tuple[tuple[str, str], ...] = ()
    """W3C's `traceparent` and `tracestate`, if it is traced."""
