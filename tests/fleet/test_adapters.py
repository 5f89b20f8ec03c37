"""Who keeps the list of a model's adapters: two who load different ones under one name."""

import asyncio
import io

import pytest
from fake_backend import FakeBackend
from fleets import fleet_of

from penstock.backends.base import Adapters
from penstock.clock import SystemClock
from penstock.config.tree import LogConfig
from penstock.errors import InvalidRequest
from penstock.fleet.adapters import AdapterKeeper, AdapterSource
from penstock.telemetry.log import Log

CLOCK = SystemClock()


class LoadingBackend(FakeBackend):
    """Its worker reads what it is told to when the test says so."""

    takes_adapters = True

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.reported: list[tuple[str, str]] = []
        self._paths: dict[str, str] = {}

    def load_adapter(self, name: str, path: str, digest: str, *, is_wanted: bool = False) -> None:
        self.reported.append((name, path))
        self._paths[name] = path

    def keep_adapters(self, names: tuple[str, ...]) -> None:
        """It keeps all."""

    def unload_adapter(self, name: str) -> None:
        self.reported.append((name, ""))
        self._paths.pop(name, None)

    def read(self) -> None:
        self.status.adapters = Adapters(frozenset(self._paths), paths=dict(self._paths))
        self.on_change()


def test_of_two_that_load_different_adapters_as_one_name_the_first_hears_at_once() -> None:
    """Each at a gateway process of its own: this one is told what the other has loaded."""

    async def check() -> None:
        backend = LoadingBackend()
        keeper = AdapterKeeper(fleet_of(CLOCK, {"m": backend}), Log(LogConfig(), CLOCK, stream=io.StringIO()))
        loading = asyncio.create_task(keeper.load("m", "fr", AdapterSource("/one")))
        await asyncio.sleep(0)
        keeper.adopt({"m": {"fr": "/two"}})
        backend.read()
        async with asyncio.timeout(10):
            with pytest.raises(InvalidRequest, match="'fr' was unloaded, or loaded from elsewhere"):
                await loading
            await keeper.load("m", "fr", AdapterSource("/two"))
        assert backend.reported[:2] == [("fr", "/one"), ("fr", "/two")]

    asyncio.run(check())


def test_the_address_of_an_adapter_that_has_the_name_is_told_without_its_secrets() -> None:
    async def check() -> None:
        backend = LoadingBackend()
        keeper = AdapterKeeper(fleet_of(CLOCK, {"m": backend}), Log(LogConfig(), CLOCK, stream=io.StringIO()))
        keeper.adopt({"m": {"fr": "https://me:s3cret@host/fr?sig=a5bc"}})
        with pytest.raises(InvalidRequest, match=r"loaded from https://host/fr\. Unload it first"):
            await keeper.load("m", "fr", AdapterSource("/two"))

    asyncio.run(check())
