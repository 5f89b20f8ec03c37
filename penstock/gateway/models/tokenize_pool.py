"""Tokenizing without stalling the event loop.

A short prompt takes less time than handing it to a thread, so it is done in place. A long one (a megabyte
is a quarter of a second) goes to one of two threads; the tokenizer lets go of the GIL meanwhile. A chat
template that runs in a process of its own is waited for in a thread of its own, so that its model's requests
wait for nobody's but each other; the metrics and the log say which model that is, and why.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.errors import Overloaded
from penstock.gateway.models.served import ServedModel
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.text.chat import USED_UP, ChatTemplate
from penstock.text.metered import RanAway
from penstock.types import ModelName

NUM_THREADS = 2
APART_WAITING_MAX = 256
"""Requests of one model that wait for its template's process."""

INLINE_BYTES = 8 * 1024
"""Bodies up to this size are tokenized on the event loop (about 2 ms); longer ones in a thread."""
WAITING_MAX = 256
"""Long bodies that wait for a tokenizing thread; one more is refused as overloaded."""

T = TypeVar("T")


class TokenizePool:
    """Runs work on prompts, in place or in a thread, by the size of the body that it comes from."""

    def __init__(self, metrics: Metrics, log: Log) -> None:
        self._metrics, self._log = metrics, log
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.num_waiting = 0
        self._apart: dict[ChatTemplate, _Apart] = {}
        self._logged: set[tuple[ModelName, str]] = set()
        """Models and reasons whose line is in the log."""

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which raises what `work` raises.

        Raises:
            Overloaded: too much is waiting already.
        """
        if num_bytes <= INLINE_BYTES:
            return work()
        if self.num_waiting >= WAITING_MAX:
            raise Overloaded("Too many long prompts are waiting to be tokenized. Try again shortly.")
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_waiting -= 1

    async def render(
        self, num_bytes: int, model: ServedModel, with_tools: bool, work: Callable[[bool], T]
    ) -> T:
        """The result of `work(may_block)`, which renders with this model's template and raises `RanAway`
        rather than block.

        Raises:
            Overloaded: too much is waiting already.
        """
        template = model.template
        if template.runs_here(with_tools):
            try:
                return await self.run(num_bytes, lambda: work(False))
            except RanAway:
                pass
        self._count_apart(model.name, template.why_apart(with_tools))
        apart = self._apart.get(template)
        if apart is None:
            apart = self._apart[template] = _Apart()
        return await apart.run(lambda: work(True))

    def _count_apart(self, model: ModelName, why: str | None) -> None:
        """`why` None: only this request is too large to be rendered here, so the log has no line about it."""
        reason = "request_size" if why is None else "allowance" if why == USED_UP else "unpriced"
        self._metrics.template_child(model, reason)
        if why is not None and (model, why) not in self._logged:
            self._logged.add((model, why))
            self._log.warning("a chat template runs in a child process", model=model, why=why)

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for template, apart in self._apart.items():
            apart.close()
            template.close()


class _Apart:
    """The thread that waits for one template's process."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="template")
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        if self._num_waiting >= APART_WAITING_MAX:
            raise Overloaded(
                "Too many requests are waiting for this model's chat template. Try again shortly."
            )
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, work)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
