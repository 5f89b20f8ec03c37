"""Brings a foreign worker to the adapters (LoRA) that are wanted of it, with vLLM's API for that.

    wanted and not listed ──> POST /v1/load_lora_adapter ──────────┐
    listed, and not wanted any more, or                            ├──> GET /v1/models
    from elsewhere than wanted ──> POST /v1/unload_lora_adapter ───┘

One call after the other. Several gateway processes may tell one worker the same: whatever a call answered,
what the worker lists counts. A worker that has started again lists nothing, and gets the order again.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import msgspec

from penstock.backends.http.client import HttpClient
from penstock.backends.http.small_answer import ProbeFailed, fetch
from penstock.protocol.server_answers import refusal_text

ANSWER_BYTES_MAX = 64 * 1024
WHY_CHARS_MAX = 500
_LOAD, _UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
_NO_API = (
    "the worker loads no adapters while it runs: start vLLM with --enable-lora and "
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
)
_FILE = "file://"


class AdapterCalls:
    """Of one worker."""

    def __init__(
        self, client: HttpClient, *, look: Callable[[], Awaitable[None]], on_adapters: Callable[[], None]
    ) -> None:
        """`look` asks the worker what it lists, and ends in `listed_now`."""
        self.failed: dict[str, str] = {}
        """Of those that are wanted, why they cannot be had."""
        self._client, self._look, self._on_adapters = client, look, on_adapters
        self._listed: Mapping[str, str] = {}
        self._wanted: dict[str, str] = {}  # Bounded by who wants them (fleet/adapters.py).
        self._leave: set[str] = set()
        """To be unloaded if they are not wanted, or listed from elsewhere than wanted."""
        self._calling: asyncio.Task[None] | None = None

    @property
    def matter(self) -> bool:
        """Whether there are any, so that the worker must be asked now and then."""
        return bool(self._listed or self._wanted)

    def served(self) -> frozenset[str]:
        """Names that requests may use: what it has, and no other one under a name than is wanted."""
        return frozenset(name for name in self._listed if name not in self.failed and self._is_right(name))

    def paths(self) -> dict[str, str]:
        """Where those are from that it has, and those that it could not load, as they were wanted."""
        found = {name: path for name, path in self._listed.items() if path}
        right = (name for name in self._wanted if name in self.failed or self._is_right(name))
        return found | {name: self._wanted[name] for name in right}

    def want(self, name: str, path: str, digest: str) -> None:
        """It is to have this one. One that it could not load is tried again."""
        self._wanted[name] = path
        self._leave.add(name)
        self.failed.pop(name, None)
        if digest:
            self._fail(name, "vLLM does not tell the digests of what it loads")
        elif "://" in path.removeprefix(_FILE):
            self._fail(name, "vLLM reads directories of its own machine")
        self._go_on()

    def want_no_more(self, name: str) -> None:
        """It is to have none of this name."""
        self._wanted.pop(name, None)
        self.failed.pop(name, None)
        self._leave.add(name)
        self._go_on()

    def listed_now(self, listed: Mapping[str, str]) -> None:
        """The worker says that it has these, and from where; empty: it does not say."""
        self._listed = listed
        for name in self._wanted:
            if name in listed and name not in self._leave and not self._is_right(name):
                self._fail(name, f"the worker has another one of this name, from {listed[name]}")
        if self._calling is None:
            self._leave.intersection_update(listed)
        self._go_on()

    def close(self) -> None:
        """Call no more."""
        if self._calling is not None:
            self._calling.cancel()

    def _is_right(self, name: str) -> bool:
        """Whether what is listed is what is wanted, as far as is known."""
        wanted = self._wanted.get(name)
        return wanted is None or self._listed.get(name) in ("", wanted.removeprefix(_FILE))

    def _fail(self, name: str, why: str) -> None:
        self.failed[name] = why[:WHY_CHARS_MAX]
        self._on_adapters()

    def _go_on(self) -> None:
        if self._calling is None and self._next() is not None:
            self._calling = asyncio.create_task(self._call_all(), name=f"adapters of {self._client.address}")

    def _next(self) -> tuple[str, str] | None:
        """A name and the path that it is to be loaded from; empty: it is to be unloaded."""
        for name in sorted(self._leave):
            is_wanted = name in self._wanted and (name in self.failed or self._is_right(name))
            if name in self._listed and not is_wanted:
                return name, ""
        for name, path in self._wanted.items():
            if name not in self._listed and name not in self.failed:
                return name, path
        return None

    async def _call_all(self) -> None:
        try:
            while (due := self._next()) is not None:
                name, path = due
                why = await self._call(name, path.removeprefix(_FILE))
                await self._look()
                if not path or name in self._wanted:  # Else it was wanted no more while it was loaded.
                    self._leave.discard(name)
                is_same = path == self._wanted.get(name, "") or not path
                if name in self._wanted and is_same and bool(path) is not (name in self._listed):
                    self._fail(name, why or "the worker does not list what it was told")
                self._on_adapters()
        except ProbeFailed:
            pass  # It is lost: when it is back it says what it has.
        finally:
            self._calling = None

    async def _call(self, name: str, path: str) -> str:
        """Why it was refused; empty if it was not."""
        order = {"lora_name": name, "lora_path": path} if path else {"lora_name": name}
        url = _LOAD if path else _UNLOAD
        status, body = await fetch(self._client, url, ANSWER_BYTES_MAX, body=msgspec.json.encode(order))
        if status in (404, 405) and b'"detail"' in body:  # The route is not there.
            return _NO_API
        return "" if status == 200 else refusal_text(status, body)
