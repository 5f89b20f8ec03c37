"""Workers that are found by name or in a cluster: who joins, who leaves, and what failures change
(nothing).
"""

import asyncio
import contextlib
import io

import dns.asyncresolver
import dns.message
import dns.rcode
import dns.rrset
import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Recorder, Requests
from kube_api import KubeApi, make_slice
from launcher_conformance import DOUBLES, Place
from scripted_runner import scripted_text

from penstock.cli.wiring.models import make_dependencies
from penstock.clock import SystemClock
from penstock.config.fleet import DiscoverConfig, KubernetesConfig
from penstock.config.tree import Config, LogConfig, ModelConfig
from penstock.errors import ConfigError
from penstock.fleet import discovery as discovery_module
from penstock.fleet import kubernetes
from penstock.fleet.discovery import Discovery, DnsSource, LookupFailed, SrvLookup, addresses, lookup_for
from penstock.fleet.kubernetes import KubernetesSource
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.supervised import LocalLauncher
from penstock.fleet.members import DiscoveredAddress, DiscoveredWorkers, Members, worker_at, zmq_address
from penstock.fleet.registry import Registry
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import FinishReason

READY, NOT_READY = {"ready": True}, {"ready": False}
LEAVING = {"ready": False, "serving": True, "terminating": True}


class Applied:
    """Stands for the members: keeps what was applied last, and wakes whoever waits for it."""

    def __init__(self) -> None:
        self.history: list[tuple[str, ...]] = []
        self._changed = asyncio.Event()

    async def apply(self, source, wanted) -> None:
        assert source == "test"
        self.history.append(tuple(each.url for each in wanted))
        self._changed.set()

    async def next(self) -> tuple[str, ...]:
        async with asyncio.timeout(10):
            await self._changed.wait()
        self._changed.clear()
        return self.history[-1]


def made(applied: Applied, **config: object) -> tuple[DiscoveredWorkers, Log, io.StringIO]:
    text = io.StringIO()
    log = Log(LogConfig(), SystemClock(), stream=text)
    settings = DiscoverConfig(engine="vllm", **{"dns": "x:80", **config})
    return DiscoveredWorkers("test", settings, lambda worker: worker, applied, log), log, text


def run(check, *arguments) -> None:
    async def timed() -> None:
        async with asyncio.timeout(20):
            await check(*arguments)

    asyncio.run(timed())


# --- what is made of an endpoint ------------------------------------------------------------------


def test_an_endpoint_becomes_a_worker_of_the_configured_kind() -> None:
    config = DiscoverConfig(engine="vllm", kind="l4", kv_events=5557, scheme="https", priorities=True)
    worker = worker_at(DiscoveredAddress("fd00::1", 8000), config)
    assert worker.url == "https://[fd00::1]:8000"
    assert worker.priorities
    assert (worker.engine, worker.kind, worker.kv_events, worker.kv_replay) == ("vllm", "l4", 5557, "")
    assert (
        worker_at(DiscoveredAddress("10.0.0.1", 70), DiscoverConfig(engine="penstock")).url
        == "tcp:10.0.0.1:70"
    )


@pytest.mark.parametrize(
    ("url", "given", "address"),
    [
        ("http://gpu-1:8000/v1", 5557, "tcp://gpu-1:5557"),
        ("https://[fd00::1]:8000", "5557", "tcp://[fd00::1]:5557"),
        ("tcp:10.0.0.1:70", 5557, "tcp://10.0.0.1:5557"),
        ("unix:/run/w.sock", 5557, "tcp://127.0.0.1:5557"),
        ("http://gpu-1:8000", "tcp://gpu-2:1", "tcp://gpu-2:1"),
        ("http://gpu-1:8000", "", ""),
        ("http://gpu-1:8000", 0, ""),
    ],
)
def test_kv_events_are_at_an_address_or_at_a_port_of_the_workers_host(url, given, address) -> None:
    assert zmq_address(url, given) == address


def test_only_changes_are_applied_and_only_so_many_are_taken(monkeypatch) -> None:
    monkeypatch.setattr("penstock.fleet.members.FOUND_MAX", 2)

    async def check() -> None:
        applied = Applied()
        found, _, text = made(applied)
        for names in ("ba", "ab", "abc", ""):
            await found.take(DiscoveredAddress(name, 1) for name in names)
        assert applied.history == [("http://a:1", "http://b:1"), ()]
        assert text.getvalue().count("more workers than are taken") == 1

    run(check)


# --- DNS ------------------------------------------------------------------------------------------


def test_a_lookup_that_fails_changes_nothing_and_an_empty_one_is_believed_the_third_time(monkeypatch) -> None:
    monkeypatch.setattr("penstock.fleet.discovery.TIMEOUT_S", 0.05)

    async def check() -> None:
        applied, answers = Applied(), []
        found, log, text = made(applied)
        a, b = DiscoveredAddress("a", 1), DiscoveredAddress("b", 1)

        async def lookup(name: str) -> tuple[DiscoveredAddress, ...]:
            assert name == "x:80"
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            if answer is None:
                await asyncio.Event().wait()
            return answer

        source = DnsSource(found, lookup, log)
        answers[:] = [(a,), LookupFailed("away"), None, LookupFailed("away"), (), (), (a, b), (), (), (), ()]
        while answers:
            await source.look()
        assert applied.history == [("http://a:1",), ("http://a:1", "http://b:1"), ()]
        assert "away" in text.getvalue()
        assert "no answer within 0.05 s" in text.getvalue()

    run(check)


def test_it_asks_again_and_again(monkeypatch) -> None:
    monkeypatch.setattr("penstock.fleet.discovery.REFRESH_S", 0.1)

    async def check() -> None:
        applied, numbers = Applied(), iter(range(100))

        async def lookup(_: str) -> tuple[DiscoveredAddress, ...]:
            return (DiscoveredAddress("h", next(numbers)),)

        found, log, _ = made(applied)
        task = asyncio.create_task(DnsSource(found, lookup, log).run())
        assert [await applied.next() for _ in range(3)] == [(f"http://h:{i}",) for i in range(3)]
        task.cancel()

    run(check)


def test_addresses_are_what_this_machine_resolves() -> None:
    async def check() -> None:
        assert DiscoveredAddress("127.0.0.1", 8000) in await lookup_for("localhost:8000")("localhost:8000")
        assert await addresses("[::1]:8000".replace("[", "").replace("]", "")) == (
            DiscoveredAddress("::1", 8000),
        )

    run(check)


class NameServer(asyncio.DatagramProtocol):
    """Answers SRV questions from a table; a name that it does not know does not exist."""

    def __init__(self, records: dict[str, list[str]]) -> None:
        self.records, self.code = records, dns.rcode.NXDOMAIN

    def connection_made(self, transport) -> None:
        self.transport = transport

    def datagram_received(self, data, where) -> None:
        query = dns.message.from_wire(data)
        answer = dns.message.make_response(query)
        name = query.question[0].name
        if records := self.records.get(str(name)):
            answer.answer.append(dns.rrset.from_text(name, 30, "IN", "SRV", *records))
        else:
            answer.set_rcode(self.code)
        self.transport.sendto(answer.to_wire(), where)


def test_srv_records_name_hosts_and_ports() -> None:
    async def check() -> None:
        name = "_http._tcp.vllm.default.svc."
        table = {
            name: ["0 50 8000 a.svc.", "0 50 8001 b.svc.", "10 50 9 backup.svc."],
            "_no._tcp.x.": ["0 0 0 ."],
        }
        transport, server = await asyncio.get_running_loop().create_datagram_endpoint(
            lambda: NameServer(table), local_addr=("127.0.0.1", 0)
        )
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.lifetime = ["127.0.0.1"], 2.0
        resolver.port = transport.get_extra_info("sockname")[1]
        lookup = SrvLookup(resolver)
        assert set(await lookup(name)) == {DiscoveredAddress("a.svc", 8000), DiscoveredAddress("b.svc", 8001)}
        assert await lookup("_no._tcp.x.") == await lookup("_gone._tcp.x.") == ()
        server.code = dns.rcode.SERVFAIL
        with pytest.raises(LookupFailed):
            await lookup("_gone._tcp.x.")
        transport.close()

    run(check)


def test_srv_needs_its_library(monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "dns.asyncresolver", None)
    with pytest.raises(ConfigError, match=r"penstock\[dns\]"):
        lookup_for("_http._tcp.x")


# --- Kubernetes -----------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def followed(monkeypatch, api: KubeApi, **config: object):
    """A source that follows an API server."""
    monkeypatch.setattr(kubernetes, "BACKOFF_MIN_S", 0.01)
    monkeypatch.setattr(kubernetes, "BACKOFF_MAX_S", 0.05)
    await api.start()
    applied = Applied()
    found, log, text = made(applied, dns="")
    settings = KubernetesConfig(
        namespace="default", service="vllm", api_server=api.url, **{"account": "", **config}
    )
    task = asyncio.create_task(KubernetesSource(found, settings, SystemClock(), log).run())
    try:
        yield applied, text
    finally:
        task.cancel()
        await api.stop()


def urls(*hosts: str) -> tuple[str, ...]:
    return tuple(f"http://{host}" for host in hosts)


async def until(check) -> None:
    async with asyncio.timeout(10):
        while not check():
            await asyncio.sleep(0.005)


def test_endpoints_join_when_they_are_ready_and_leave_when_they_terminate(monkeypatch) -> None:
    async def check() -> None:
        api = KubeApi(page=1)
        api.slices = {
            "s-1": make_slice("s-1", ("1", "10.0.0.1", READY), ("2", "10.0.0.2", NOT_READY)),
            "s-2": make_slice("s-2", ("3", "10.0.0.3", {}), ("1", "10.0.0.1", READY)),
        }
        async with followed(monkeypatch, api) as (applied, _):
            assert await applied.next() == urls("10.0.0.1:8000", "10.0.0.3:8000"), "unknown counts as ready"
            await until(lambda: api.num_watches == 1)
            await api.put(make_slice("s-1", ("1", "10.0.0.1", READY), ("2", "10.0.0.2", READY)))
            assert await applied.next() == urls("10.0.0.1:8000", "10.0.0.2:8000", "10.0.0.3:8000")
            await api.put(make_slice("s-2", ("3", "10.0.0.3", LEAVING)))
            assert await applied.next() == urls("10.0.0.1:8000", "10.0.0.2:8000")
            await api.delete("s-1")
            assert await applied.next() == ()
        assert [query.get("continue") for _, query in api.requests[:2]] == [None, "1"]
        assert api.requests[2][1]["resourceVersion"] == "100"

    run(check)


def test_of_a_pod_with_two_families_one_address_is_taken(monkeypatch) -> None:
    async def check() -> None:
        api = KubeApi()
        api.slices = {
            "4": make_slice("4", ("1", "10.0.0.1", READY)),
            "6": make_slice("6", ("1", "fd00::1", READY), ("2", "fd00::2", READY), family="IPv6"),
        }
        async with followed(monkeypatch, api) as (applied, _):
            assert await applied.next() == urls("10.0.0.1:8000", "[fd00::2]:8000")

    run(check)


@pytest.mark.parametrize(
    ("config", "host"), [({"port": 9}, "a:9"), ({"port": "http"}, "a:8000"), ({"port": "x"}, None)]
)
def test_the_port_is_the_configured_one(monkeypatch, config, host) -> None:
    async def check() -> None:
        api = KubeApi()
        api.slices = {"s": make_slice("s", ("1", "a", READY))}
        async with followed(monkeypatch, api, **config) as (applied, _):
            assert await applied.next() == (urls(host) if host else ())

    run(check)


def test_a_broken_watch_goes_on_from_its_version_and_a_forgotten_one_from_a_list(monkeypatch) -> None:
    async def check() -> None:
        api = KubeApi()
        api.slices = {"s": make_slice("s", ("1", "a", READY))}
        async with followed(monkeypatch, api) as (applied, _):
            assert await applied.next() == urls("a:8000")
            await until(lambda: api.num_watches == 1)
            await api.bookmark()
            await until(lambda: api.num_watches == 1)
            await asyncio.sleep(0.1)
            await api.cut()
            await api.put(make_slice("s", ("2", "b", READY)))
            assert await applied.next() == urls("b:8000")
            kinds = [query.get("resourceVersion", "list") for _, query in api.requests]
            assert kinds[:2] == ["list", "100"]
            assert kinds[-1] == "101", "the bookmark's"
            api.slices["s"] = make_slice("s", ("3", "c", READY))  # Nobody is told of this.
            api.version += 10
            api.forget()
            await api.cut()
            assert await applied.next() == urls("c:8000")
            assert "list" in [query.get("resourceVersion", "list") for _, query in api.requests[2:]]

    run(check)


def test_workers_stay_while_the_api_server_refuses_and_a_new_token_is_taken(monkeypatch, tmp_path) -> None:
    async def check() -> None:
        token = tmp_path / "token"
        token.write_text("old\n")
        api = KubeApi(token="old")
        api.slices = {"s": make_slice("s", ("1", "a", READY))}
        async with followed(monkeypatch, api, account=str(token.parent)) as (applied, text):
            assert await applied.next() == urls("a:8000")
            await until(lambda: api.num_watches == 1)
            api.token = "new"
            await api.cut()
            await until(lambda: "refuses (401)" in text.getvalue())
            assert applied.history == [urls("a:8000")]
            token.write_text("new\n")
            await until(lambda: api.num_watches == 1)
            await api.put(make_slice("s", ("2", "b", READY)))
            assert await applied.next() == urls("b:8000")

    run(check)


def test_an_answer_that_is_none_is_reported_and_tried_again(monkeypatch) -> None:
    async def check() -> None:
        api = KubeApi()
        api._list = lambda query: {"metadata": 5}
        async with followed(monkeypatch, api) as (applied, text):
            await until(lambda: "cannot be read" in text.getvalue())
            del api._list
            assert await applied.next() == ()

    run(check)


def test_without_a_pod_an_api_server_must_be_named() -> None:
    config = KubernetesConfig(namespace="n", service="s")
    with pytest.raises(ConfigError, match="api_server"):
        kubernetes.api_server(config, {})
    at = kubernetes.api_server(
        config, {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "6443"}
    )
    assert str(at) == "https://[fd00::1]:6443"


# --- together with the registry, and a worker of ours on a port -----------------------------------


def test_a_worker_at_a_name_joins_answers_and_leaves(tmp_path, monkeypatch) -> None:
    async def check() -> None:
        clock, log = SystemClock(), Log(LogConfig(), SystemClock(), stream=io.StringIO())
        launcher = LocalLauncher(
            clock,
            b"secret" * 4,
            environment={"PYTHONPATH": DOUBLES},
            logs=WorkerLogs(lambda _: None),
            host="127.0.0.1",
        )
        monkeypatch.setenv("LINK_KEY", launcher.link_key.decode())
        place = Place(launcher, tmp_path)
        launched = await place.start()
        await launched.wait_ready()
        port = str(launched.address).rpartition(":")[2]
        registry = Registry(clock, log, workers_max=8)
        members = Members(registry, log, drain_timeout_s=5.0)
        discovery = Discovery(members, clock, log)
        where = DiscoverConfig(dns=f"127.0.0.1:{port}", engine="penstock", api_key_env="LINK_KEY")
        model = ModelConfig(path="scripted", replicas=0, discover=(where,))
        config = Config()
        await discovery.apply(
            model, byte_tokenizer(), make_dependencies(config, Metrics(["scripted"], version=""), clock)
        )
        await until(lambda: registry.of("scripted").is_ready)
        (worker,) = registry
        assert worker.id == f"scripted@tcp:127.0.0.1:{port}"
        recorder = Recorder()
        worker.backend.generate(Requests().make(seed=3, max_tokens=9), recorder)
        assert (await recorder.end()).reason is FinishReason.LENGTH
        assert recorder.text == scripted_text(3, 3, 9)
        discovery.stop()
        await members.close(1.0)
        assert len(registry) == 0
        assert launched.backend.status.ready, "who only uses a worker does not end it"
        await launcher.close(timeout_s=0.1)

    run(check)


# --- a new configuration --------------------------------------------------------------------------


def test_sources_come_go_and_change_while_others_go_on(monkeypatch) -> None:
    """Names are looked up in a table here; the workers are vLLMs that nobody answers for."""
    table = {"a:1": ("h1", "h2"), "b:1": ("h3",)}
    asked: list[str] = []

    def lookup_of(_: str):
        async def lookup(name: str) -> tuple[DiscoveredAddress, ...]:
            asked.append(name)
            if name not in table:
                raise LookupFailed("away")
            return tuple(DiscoveredAddress(host, 9) for host in table[name])

        return lookup

    monkeypatch.setattr(discovery_module, "lookup_for", lookup_of)
    monkeypatch.setattr("penstock.fleet.discovery.REFRESH_S", 60.0)

    async def check() -> None:
        clock, log = SystemClock(), Log(LogConfig(), SystemClock(), stream=io.StringIO())
        registry = Registry(clock, log, workers_max=8)
        members = Members(registry, log, drain_timeout_s=5.0)
        discovery = Discovery(members, clock, log)
        tools = make_dependencies(Config(), Metrics(["m"], version=""), clock)

        def source(dns: str, **settings: object) -> DiscoverConfig:
            return DiscoverConfig(dns=dns, engine="vllm", **settings)

        async def apply(*sources: DiscoverConfig) -> None:
            model = ModelConfig(path="m", replicas=0, discover=sources)
            await discovery.apply(model, byte_tokenizer(), tools)

        def there() -> dict[str, object]:
            return {worker.id.partition("@")[2]: worker.backend for worker in registry}

        await apply(source("a:1"))
        await until(lambda: there().keys() == {"h1:9", "h2:9"})
        first = there()

        await apply(source("b:1"), source("a:1"))
        await until(lambda: len(registry) == 3)
        assert asked == ["a:1", "b:1"], "one that stays as it was is not begun anew, wherever it stands"

        await apply(source("b:1", kind="t4"), source("a:1"))
        await until(lambda: asked == ["a:1", "b:1", "b:1"])
        assert there().items() >= first.items(), "nobody had to leave"

        del table["b:1"]
        await apply(source("b:1", kind="l4"), source("a:1"))
        await until(lambda: len(asked) == 4)
        assert "h3:9" in there(), "while the changed source finds nothing its workers stay"

        table["b:1"] = ("h3",)
        before = there()["h3:9"]
        await apply(source("b:1", kind="l40"), source("a:1"))
        await until(lambda: there().get("h3:9", before) is not before)
        assert there().items() >= first.items()

        await apply(source("a:1"))
        await until(lambda: there() == first)

        async def refuses(config: DiscoverConfig) -> None:
            with pytest.raises(ConfigError, match=r"kubernetes\.api_server"):
                await apply(config)

        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        await refuses(
            DiscoverConfig(kubernetes=KubernetesConfig(namespace="n", service="s", account=""), engine="vllm")
        )
        assert there() == first, "what cannot be changes nothing"
        await apply()
        await until(lambda: not registry)
        discovery.stop()
        await members.close(0.0)

    run(check)
