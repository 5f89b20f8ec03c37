import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator

import pytest
from scripted_endpoint import Script, StandIn

Scripted = Callable[[Script], tuple[str, StandIn]]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No variable of the developer's own changes what a test sees, nor a key of a server that runs here."""
    for name in list(os.environ):
        if name.startswith("PENSTOCK_") or name in {"FORCE_COLOR", "NO_COLOR"}:
            monkeypatch.delenv(name)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("PENSTOCK_STATE_DIR", str(tmp_path_factory.mktemp("state")))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path_factory.mktemp("run")))


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """Starts scripted endpoints on a loop in another thread; gives base URL and server."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    stack = contextlib.AsyncExitStack()

    def start(script: Script) -> tuple[str, StandIn]:
        stand_in = StandIn(script)
        entering = asyncio.run_coroutine_threadsafe(stack.enter_async_context(stand_in.listening()), loop)
        return entering.result(10), stand_in

    yield start
    asyncio.run_coroutine_threadsafe(stack.aclose(), loop).result(10)
    loop.call_soon_threadsafe(loop.stop)
    thread.join(10)
    loop.close()
