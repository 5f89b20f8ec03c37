"""Adapters that a foreign worker is told to load while it runs, by vLLM's API: what it lists counts."""

from collections.abc import Awaitable, Callable

from engine_stand_ins import VllmStandIn, until
from test_http_backend import run

from penstock.backends.http.backend import HttpBackend
from penstock.backends.http.terms import HttpBackendLimits


class LoadingVllm(VllmStandIn):
    LOADS_ADAPTERS = True

    @property
    def orders(self) -> list[tuple[str, str, str]]:
        return [
            (each.path.split("/")[-1].split("_")[0], each.json["lora_name"], each.json.get("lora_path", ""))
            for each in self.requests
        ]


def check_with(server: VllmStandIn, check: Callable[[HttpBackend], Awaitable[None]]) -> None:
    async def when_ready(backend: HttpBackend) -> None:
        await until(lambda: backend.status.ready)
        assert backend.takes_adapters
        await check(backend)

    run(server, "vllm", when_ready, config=HttpBackendLimits(probe_s=0.02))


def test_they_come_and_go_one_call_after_the_other() -> None:
    server = LoadingVllm()

    async def check(backend: HttpBackend) -> None:
        reported = backend.status
        backend.load_adapter("fr", "/a/fr", "")
        backend.load_adapter("de", "file:///a/de", "")
        backend.load_adapter("fr", "/a/fr", "", is_wanted=True)
        await until(lambda: reported.adapters.served == {"fr", "de"})
        assert reported.adapters.paths == {"fr": "/a/fr", "de": "file:///a/de"}
        backend.load_adapter("fr", "/a/fr", "")  # Again: nothing changes.
        backend.unload_adapter("de")
        await until(lambda: reported.adapters.served == {"fr"})
        backend.load_adapter("fr", "/b/fr", "")  # Another one under the name: the first one goes.
        await until(lambda: reported.adapters.paths == {"fr": "/b/fr"})
        assert server.orders == [
            ("load", "fr", "/a/fr"), ("load", "de", "/a/de"), ("unload", "de", ""),
            ("unload", "fr", ""), ("load", "fr", "/b/fr"),
        ]  # fmt: skip

    check_with(server, check)


def test_why_one_cannot_be_had_is_told_and_costs_no_other() -> None:
    server = LoadingVllm()

    async def check(backend: HttpBackend) -> None:
        backend.load_adapter("x", "/a/bad", "")
        backend.load_adapter("far", "s3://models/fr", "")
        backend.load_adapter("sure", "/a/fr", "5f0c")
        backend.load_adapter("fr", "/a/fr", "")
        await until(lambda: backend.status.adapters.served == {"fr"})
        adapters = backend.status.adapters
        assert adapters.failed == {
            "x": "The lora adapter 'x': No adapter found for /a/bad",
            "far": "vLLM reads directories of its own machine",
            "sure": "vLLM does not tell the digests of what it loads",
        }
        assert adapters.paths["far"] == "s3://models/fr"
        backend.unload_adapter("x")
        await until(lambda: "x" not in backend.status.adapters.failed)

    check_with(server, check)


def test_a_worker_that_does_not_let_them_come_says_how_it_would() -> None:
    server = VllmStandIn()

    async def check(backend: HttpBackend) -> None:
        backend.load_adapter("fr", "/a/fr", "")
        await until(lambda: "fr" in backend.status.adapters.failed)
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1" in backend.status.adapters.failed["fr"]
        assert backend.status.ready

    check_with(server, check)


def test_what_others_have_loaded_counts_and_what_was_lost_comes_again() -> None:
    server = LoadingVllm()
    server.adapters, server.roots = ("fr", "own"), {"fr": "/a/fr", "own": "/a/own"}

    async def check(backend: HttpBackend) -> None:
        reported = backend.status
        await until(lambda: reported.adapters.served == {"fr", "own"})
        backend.load_adapter("fr", "/a/fr", "")
        backend.load_adapter("de", "/a/de", "")
        await until(lambda: reported.adapters.served == {"fr", "own", "de"})
        assert server.orders == [("load", "de", "/a/de")]
        server.adapters, server.roots = ("own",), {"own": "/a/own"}  # It has started again.
        await until(lambda: server.orders[1:] == [("load", "fr", "/a/fr"), ("load", "de", "/a/de")])
        # Somebody else's order: no requests go to what is another adapter, and nobody takes turns for ever.
        server.roots["fr"] = "/z/fr"
        await until(lambda: "fr" in reported.adapters.failed)
        assert "from /z/fr" in reported.adapters.failed["fr"]
        assert reported.adapters.served == {"own", "de"}
        assert len(server.orders) == 3

    check_with(server, check)
