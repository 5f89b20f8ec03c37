"""A pool of pods against kmock's API server: how many there are, which of them leave, who may change that."""

import asyncio
import io
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("kmock")
import kmock
from conformance import Requests
from fake_backend import FakeBackend
from kube_cluster import DEPLOYMENTS, STATEFULSETS, KubeCluster

from penstock.clock import NS_PER_S, ManualClock
from penstock.config.checks import check
from penstock.config.fleet import KubernetesConfig
from penstock.config.load import convert_config
from penstock.config.scale import ScalePoolConfig
from penstock.config.tree import LogConfig
from penstock.fleet.launchers.kubernetes import ANNOTATION, PLACELESS_S, KubernetesPool, PoolTools
from penstock.fleet.leadership import Leadership
from penstock.fleet.members import Members
from penstock.fleet.registry import Registry, Worker
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.types import WorkerId


@dataclass(slots=True, frozen=True)
class Found:
    """A worker that discovery has found at a pod's address."""

    id: WorkerId
    backends: dict[WorkerId, FakeBackend] = field(compare=False)
    clock: ManualClock = field(compare=False)

    async def open(self, registry: Registry) -> Worker:
        backend = self.backends[self.id] = FakeBackend(self.clock)
        return registry.new(self.id, "river", backend)


class Leads:
    """A server's place among others."""

    def __init__(self, token: int = 1) -> None:
        self.token, self.outrun_by = token, 0

    def outrun(self, token: int) -> None:
        self.token, self.outrun_by = 0, token


class Place:
    """One server before one cluster."""

    def __init__(
        self, cluster: KubeCluster, url: str, workload: str, leads: Leads | None, token: str
    ) -> None:
        self.cluster, self.clock = cluster, ManualClock(now_ns=NS_PER_S)
        self.said = io.StringIO()
        log = Log(LogConfig(), self.clock, stream=self.said)
        self.registry = Registry(self.clock, log)
        self.members = Members(self.registry, log, drain_timeout_s=600.0)
        self.backends: dict[WorkerId, FakeBackend] = {}
        config = KubernetesConfig(namespace="default", service="river", api_server=url, account=token)
        self.pool = KubernetesPool(
            "river", ScalePoolConfig(name="a", workload=workload), config,
            PoolTools(
                members=self.members, registry=self.registry, clock=self.clock, log=log,
                leadership=leads,  # type: ignore[arg-type]
            ),
        )  # fmt: skip

    async def find(self) -> None:
        """Discovery: the pods that are ready are workers."""
        ready = [pod for pod in self.cluster.pods() if pod["status"]["conditions"]]
        ids = [WorkerId(f"river@{pod['status']['podIP']}:8000") for pod in ready]
        await self.members.apply("pods", [Found(each, self.backends, self.clock) for each in ids])

    async def look(self, seconds: float = 5.0) -> tuple[int, int, int]:
        """Ready, pending, draining."""
        self.clock.advance(int(seconds * NS_PER_S))
        await self.find()
        await self.pool.look()
        await self.settle()
        state = self.pool.state()
        return state.ready, state.pending, state.draining

    async def settle(self) -> None:
        for _ in range(30):
            await asyncio.sleep(0)

    def backend(self, address: str) -> FakeBackend:
        return self.backends[WorkerId(f"river@{address}:8000")]


@asynccontextmanager
async def place(
    workload: str = "deployment/river", replicas: int = 1, leads: Leads | None = None, token: str = ""
) -> AsyncIterator[Place]:
    async with KubeCluster() as cluster, kmock.Server(cluster) as server:
        cluster.prepare(token=token and "secret")
        kind = DEPLOYMENTS if workload.startswith("deployment") else STATEFULSETS
        cluster.add("river", kind, replicas=replicas)
        yield Place(cluster, str(server.url).rstrip("/"), workload, leads, token)


class Ignored:
    """A sink that nobody reads."""

    def __getattr__(self, name: str):
        return lambda *_: None


REQUESTS = Requests()


def stream_on(backend: FakeBackend) -> None:
    backend._step_s = 3600.0
    backend.generate(REQUESTS.make(max_tokens=100_000), Ignored())


def test_out_by_the_scale_subresource_and_cold_starts_are_measured() -> None:
    async def run() -> None:
        async with place() as here:
            here.cluster.make_ready()
            assert await here.look() == (1, 0, 0)
            await here.pool.resize(3)
            assert here.cluster.replicas("river") == 3
            path, body = here.cluster.patches[-1]
            assert path == "/apis/apps/v1/namespaces/default/deployments/river/scale"
            assert body["spec"] == {"replicas": 3}
            assert body["metadata"]["resourceVersion"], "in the version that was seen"
            assert await here.look() == (1, 2, 0), "only what is ready is capacity"
            await here.pool.resize(3)
            assert len(here.cluster.patches) == 1, "nothing more is asked for in its place"
            here.cluster.make_ready()
            assert await here.look(40.0) == (3, 0, 0)
            assert here.pool.take_cold_starts() == (45.0, 45.0)

    asyncio.run(run())


def test_in_comes_the_pod_with_least_to_do_when_it_is_empty_and_no_other() -> None:
    async def run() -> None:
        async with place(replicas=3) as here:
            here.cluster.make_ready()
            assert await here.look() == (3, 0, 0)
            for address in ("10.0.0.1", "10.0.0.3"):
                stream_on(here.backend(address))
            stream_on(here.backend("10.0.0.2"))
            stream_on(here.backend("10.0.0.1"))
            await here.pool.resize(2)
            leaving = here.pool.leaving()
            assert leaving == ("river@10.0.0.2:8000",), (
                "it has as little to do as another, and comes before it"
            )
            for _ in range(3):
                assert await here.look() == (2, 0, 1)
            assert here.cluster.replicas("river") == 3, "its stream runs"
            here.backend("10.0.0.2").lose_worker("its stream has ended")
            await here.settle()
            await here.look()
            assert here.cluster.replicas("river") == 2
            assert here.cluster.deleted == ["river-0001"]
            assert [len(here.backend(f"10.0.0.{n}")._streams) for n in (1, 3)] == [2, 1], "no stream was cut"
            assert await here.look() == (2, 0, 0)

    asyncio.run(run())


def test_one_that_leaves_comes_back_if_it_is_wanted_before_it_is_empty() -> None:
    async def run() -> None:
        async with place(replicas=2) as here:
            here.cluster.make_ready()
            await here.look()
            stream_on(here.backend("10.0.0.1"))
            stream_on(here.backend("10.0.0.2"))
            await here.pool.resize(1)
            assert await here.look() == (1, 0, 1)
            await here.pool.resize(2)
            here.backend("10.0.0.1").lose_worker("its stream has ended")  # So that it may begin anew.
            await here.settle()
            assert await here.look() == (2, 0, 0)
            assert here.cluster.patches == [], "the cluster heard nothing of it"

    asyncio.run(run())


def test_a_stateful_set_gives_up_its_last_pod() -> None:
    async def run() -> None:
        async with place("statefulset/river", replicas=3) as here:
            here.cluster.make_ready()
            await here.look()
            stream_on(here.backend("10.0.0.3"))  # It has most to do, and is the last.
            await here.pool.resize(2)
            assert here.pool.leaving() == ("river@10.0.0.3:8000",)
            here.backend("10.0.0.3").lose_worker("its stream has ended")
            await here.settle()
            await here.look()
            assert here.cluster.deleted == ["river-2"]

    asyncio.run(run())


def test_a_pod_that_is_out_of_service_by_hand_is_no_capacity_and_another_one_comes() -> None:
    async def run() -> None:
        async with place(replicas=2) as here:
            here.cluster.make_ready()
            await here.look()
            here.members.hold(WorkerId("river@10.0.0.1:8000"), 600.0)
            assert await here.look() == (1, 0, 0)
            await here.pool.resize(2)
            assert here.cluster.replicas("river") == 3
            assert await here.look() == (1, 1, 0)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("refused", "words"),
    [
        ({"/scale": 403}, "the API server refuses (403): /apis/apps/v1/"),
        ({"/pods": 403}, "/api/v1/namespaces/default/pods is forbidden"),
        ({"/": 503}, "the API server refuses (503)"),
    ],
)
def test_an_api_server_that_refuses_is_said_and_the_pods_stay(refused: dict[str, int], words: str) -> None:
    async def run() -> None:
        async with place(replicas=2) as here:
            here.cluster.make_ready()
            assert await here.look() == (2, 0, 0)
            here.cluster.refuses = refused
            assert await here.look() == (2, 0, 0), "as it was seen last"
            assert words in here.pool.state().trouble
            assert words in here.said.getvalue()
            here.cluster.refuses = {}
            await here.look()
            assert here.pool.state().trouble == ""
            await here.pool.resize(3)
            assert here.cluster.replicas("river") == 3

    asyncio.run(run())


def test_a_token_that_is_no_good_and_one_that_is(tmp_path) -> None:
    async def run() -> None:
        async with place(token=str(tmp_path)) as here:
            (tmp_path / "token").write_text("old")
            await here.look()
            assert "(401)" in here.pool.state().trouble
            (tmp_path / "token").write_text("secret\n")  # The cluster renews it.
            await here.look()
            assert here.pool.state().trouble == ""

    asyncio.run(run())


def test_pods_without_a_machine_are_waited_for_for_a_while() -> None:
    async def run() -> None:
        async with place(replicas=1) as here:
            placed = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "no GPU",
            }
            here.cluster.pods()[0].patch({"status": {"conditions": [placed]}})
            assert await here.look() == (0, 1, 0)
            assert here.pool.state().trouble == ""
            await here.look(PLACELESS_S + 1)
            assert here.pool.state().trouble == "pods find no machine: no GPU"

    asyncio.run(run())


def test_pods_that_discovery_does_not_find_are_no_capacity_and_that_is_said() -> None:
    async def run() -> None:
        async with place(replicas=2) as here:
            here.cluster.make_ready()
            for seconds in (0.0, PLACELESS_S + 1):
                here.clock.advance(int(seconds * NS_PER_S))
                await here.pool.look()
            state = here.pool.state()
            assert (state.ready, state.pending) == (0, 2)
            assert "models[].discover finds no worker" in state.trouble
            await here.look()
            assert here.pool.state().trouble == ""

    asyncio.run(run())


def test_a_change_by_another_is_tried_again_on_what_there_is_then() -> None:
    async def run() -> None:
        async with place(replicas=1) as here:
            here.cluster.make_ready()
            await here.look()

            def by_hand() -> None:
                deployment = here.cluster.objects[here.cluster._key(DEPLOYMENTS, "river")]
                deployment.patch({"spec": {"replicas": 2}, "metadata": {"resourceVersion": "999"}})

            here.cluster.before = [by_hand]
            await here.pool.resize(2)
            assert here.cluster.replicas("river") == 3, "one more than there were to be"

    asyncio.run(run())


@dataclass(slots=True, frozen=True)
class TwoServers:
    """Two servers before one cluster whose pods are ready at once."""

    cluster: KubeCluster
    one: Place
    two: Place
    leads: tuple[Leads, Leads]


@asynccontextmanager
async def two_servers(replicas: int, *tokens: int) -> AsyncIterator[TwoServers]:
    async with KubeCluster() as cluster, kmock.Server(cluster) as server:
        cluster.prepare(readies=True)
        cluster.add("river", replicas=replicas)
        one_leads, two_leads = (Leads(token) for token in tokens)
        url = str(server.url).rstrip("/")
        one, two = (Place(cluster, url, "deployment/river", leads, "") for leads in (one_leads, two_leads))
        for each in (one, two):
            await each.look()
        yield TwoServers(cluster, one, two, (one_leads, two_leads))


def test_a_server_that_slept_through_its_lease_changes_nothing() -> None:
    async def run() -> None:
        async with two_servers(1, 1, 2) as here:
            cluster, old, new = here.cluster, here.one, here.two
            await old.pool.resize(2)
            assert cluster.annotation("river", ANNOTATION) == "1"
            # It sleeps between what it sees and its order; meanwhile another one leads, and orders.
            real = old.pool._call

            async def slow(client, path, patch=None):
                if patch is not None:
                    await new.look()
                    await new.pool.resize(5)
                return await real(client, path, patch)

            old.pool._call = slow
            await old.pool.resize(9)
            assert cluster.replicas("river") == 5, "the order of the one that leads"
            assert cluster.annotation("river", ANNOTATION) == "2"
            assert here.leads[0].outrun_by == 2, "it has noticed"
            assert [body["spec"]["replicas"] for _, body in cluster.patches if "spec" in body] == [2, 5]

    asyncio.run(run())


def test_what_another_server_lets_drain_drains_here_and_is_waited_for() -> None:
    async def run() -> None:
        async with two_servers(2, 1, 0) as here:
            cluster, one, two = here.cluster, here.one, here.two
            stream_on(two.backend("10.0.0.1"))
            await one.pool.resize(1)
            (leaves,) = one.pool.leaving()
            assert leaves == "river@10.0.0.1:8000"
            assert await two.pool.follow([leaves]) == (leaves,)
            assert two.registry.get(leaves).state is WorkerState.DRAINING  # type: ignore[union-attr]
            for _ in range(4):
                one.pool.hear_busy("two", await two.pool.follow([leaves]))
                await one.look(2.0)
            assert cluster.replicas("river") == 2, "the other server has a stream there"
            two.backend("10.0.0.1").lose_worker("its stream has ended")
            await two.settle()
            one.pool.hear_busy("two", await two.pool.follow([leaves]))
            await one.look()
            assert cluster.replicas("river") == 1
            assert cluster.deleted == ["river-0000"]
            assert here.leads[1].token == 0

    asyncio.run(run())


def test_the_server_that_takes_over_goes_on_with_what_leaves() -> None:
    async def run() -> None:
        async with two_servers(2, 1, 0) as here:
            cluster, one, two = here.cluster, here.one, here.two
            await one.pool.resize(1)
            await two.pool.follow(one.pool.leaving())
            here.leads[1].token = 2  # The first one is dead.
            assert await two.look() == (1, 0, 1)
            await two.look()
            assert await two.look() == (1, 0, 0)
            assert (cluster.replicas("river"), cluster.deleted) == (1, ["river-0000"])
            assert cluster.annotation("river", ANNOTATION) == "2"

    asyncio.run(run())


def test_a_real_leadership_has_what_the_pool_asks_of_it() -> None:
    assert {"token", "outrun"} <= set(dir(Leadership))


# --- the example that is in the repository ------------------------------------------------------------

MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "penstock.yaml"


def manifests() -> dict[tuple[str, str], Any]:
    found = yaml.safe_load_all(MANIFEST.read_text())
    return {(each["kind"], each["metadata"]["name"]): each for each in found}


def test_the_examples_configuration_is_one_that_serve_takes() -> None:
    config = yaml.safe_load(manifests()["ConfigMap", "penstock"]["data"]["config.yaml"])
    config["models"][0]["discover"][0]["kubernetes"]["api_server"] = "https://10.0.0.1"
    made = convert_config({**config, "auth": {"keys": ["sk-from-the-secret-0123456789"]}})
    check(made)
    (pool,) = made.models[0].scale.pools
    kind, _, name = pool.workload.partition("/")
    assert (kind.capitalize(), name) in manifests()
    where = made.models[0].discover[0].kubernetes
    assert where is not None
    assert ("Service", where.service) in manifests()


def allowed(rules: Sequence[Any], request: Any) -> bool:
    """Whether a role lets somebody do that."""
    resource = request.resource.plural + (f"/{request.subresource}" if request.subresource else "")
    verb = {"GET": "get" if request.name else "list", "PATCH": "patch"}[request.method]
    if "watch" in request.params:
        verb = "watch"
    return any(
        (request.resource.group or "") in rule["apiGroups"]
        and resource in rule["resources"]
        and verb in rule["verbs"]
        and request.name in rule.get("resourceNames", [request.name])
        for rule in rules
    )


def test_the_examples_role_allows_all_that_is_asked_for_and_nothing_else_is_allowed() -> None:
    async def run() -> None:
        rules = manifests()["Role", "penstock"]["rules"]
        async with KubeCluster() as cluster, kmock.Server(cluster) as server:
            cluster.prepare(readies=True)
            cluster.add("vllm", replicas=2)
            here = Place(cluster, str(server.url).rstrip("/"), "deployment/vllm", Leads(), "")
            await here.look()
            await here.pool.resize(3)
            await here.look()
            await here.pool.resize(2)
            for _ in range(3):
                await here.look()
            assert (cluster.replicas("vllm"), len(cluster.deleted)) == (2, 1)
            asked = cluster.asked
        assert len(asked) > 10
        assert [each.url.path for each in asked if not allowed(rules, each)] == []
        for rule in rules:
            for verb in rule["verbs"]:
                used = [each for each in asked if allowed([{**rule, "verbs": [verb]}], each)]
                assert used or "endpointslices" in rule["resources"], f"{verb} {rule['resources']}"

    asyncio.run(run())
