"""A peer cell as a backend: one of its models, over the wire of our workers (protocol/cells.py).

To the rest of the gateway it is a worker: its streams, its breaker, its drain. It has two facts more, which
placement goes by (policy/queueing/cells.py): how long a message takes there and back, measured, and what a
request would wait there. A cell that is lost is no worker that a request has crashed.
"""

import asyncio

from penstock.backends.engine.backend import EngineBackend
from penstock.backends.engine.link import WorkerKey, WorkerLink
from penstock.clock import Clock, sleep
from penstock.protocol.cells import CellPing, CellReport, OpenCell
from penstock.protocol.worker import FromWorker
from penstock.text.tokenizer import Tokenizer, tokenizer_mark

PING_S = 0.5
_SMOOTH = 4
"""The round trip follows the last so many pings; of a shorter one it follows at once, for only waiting adds
to it."""


class CellBackend(EngineBackend):
    """See the module."""

    def __init__(self, tokenizer: Tokenizer, clock: Clock, *, key: WorkerKey, model: str, here: str) -> None:
        """`here` is what this cell is called, `model` what both call the model."""
        super().__init__(tokenizer, clock, key=key)
        self._model, self._here = model, here
        self._pinging: asyncio.Task[None] | None = None
        self.rtt_ns = 0
        """There and back; 0: not measured yet."""
        self.cell_report = CellReport(sent_ns=0)
        """Its last report."""

    @property
    def takes_adapters(self) -> bool:
        """It loads its adapters itself."""
        return False

    def on_message(self, message: FromWorker, *, behind: bool = False) -> None:
        """See `LinkOwner`."""
        if isinstance(message, CellReport):
            self._measured(message)
        else:
            super().on_message(message, behind=behind)

    def on_link_lost(self, why: str) -> None:
        """See `LinkOwner`."""
        if self._link is not None:
            self._link.was_cut = True  # Its streams did not kill it: nobody is suspected of that.
        if self._pinging is not None:
            self._pinging.cancel()
            self._pinging = None
        super().on_link_lost(why)

    def _welcomed(self, link: WorkerLink) -> None:
        super()._welcomed(link)
        mark = tokenizer_mark(self._tokenizer)
        link.send(OpenCell(cell=self._here, model=self._model, tokenizer=mark))
        self._pinging = asyncio.create_task(self._keep_pinging(link), name=f"ping {self._here}")

    async def _keep_pinging(self, link: WorkerLink) -> None:
        while True:
            link.send(CellPing(self._clock.now_ns()))
            await sleep(PING_S)

    def _measured(self, report: CellReport) -> None:
        rtt_ns = max(1, self._clock.now_ns() - report.sent_ns)
        if self.rtt_ns and rtt_ns > self.rtt_ns:
            rtt_ns = self.rtt_ns + (rtt_ns - self.rtt_ns) // _SMOOTH
        self.rtt_ns, self.cell_report = rtt_ns, report
        self.on_change()
