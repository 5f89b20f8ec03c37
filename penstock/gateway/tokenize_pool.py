"""Tokenizing without stalling the event loop.

A short prompt takes less time than handing it to a thread, so it is done in place. A long one (a megabyte
is a quarter of a second) goes to one of two threads; the tokenizer lets go of the GIL meanwhile.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from penstock.config.tree import LimitsConfig
from penstock.errors import Overloaded

NUM_THREADS = 2

T = TypeVar("T")


class TokenizePool:
    """Runs work on prompts, in place or in a thread, by the size of the body that it comes from."""

    def __init__(self, limits: LimitsConfig) -> None:
        self._inline_bytes = limits.tokenize_inline_bytes
        self._waiting_max = limits.tokenize_waiting_max
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="tokenize")
        self.num_waiting = 0

    async def run(self, num_bytes: int, work: Callable[[], T]) -> T:
        """The result of `work`, which raises what `work` raises.

        Raises:
            Overloaded: too much is waiting already.
        """
        if num_bytes <= self._inline_bytes:
            return work()
        if self.num_waiting >= self._waiting_max:
            raise Overloaded("Too many long prompts are waiting to be tokenized. Try again shortly.")
        self.num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)
        finally:
            self.num_waiting -= 1

    def close(self) -> None:
        """Let the threads end; what waits is dropped."""
        self._threads.shutdown(wait=False, cancel_futures=True)
