"""Workers on a real Ray cluster of several nodes (all on this machine).

Only `make test-workers` runs this.
"""

import asyncio
import contextlib
import os
from pathlib import Path

import pytest
from launcher_conformance import DOUBLES, LauncherConformance, Place, answer, long_stream, pid_of
from raw_worker import wait_gone
from scripted_runner import scripted_text

from penstock.clock import SystemClock
from penstock.errors import ConfigError, StreamBroken, WorkerUnavailable
from penstock.fleet.launchers.process import WorkerLogs
from penstock.fleet.launchers.ray import RayLauncher, RayTerms

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.workers,
    pytest.mark.timeout(300),
    # Of Ray's own code, which is not ours to mend.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
NODES = 2


@pytest.fixture(scope="module")
def cluster():
    """A head without room for workers, and nodes with room for two each."""
    # Without this Ray takes the machine's first address, which need not be one that it can talk to itself on.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(NODES):
        made.add_node(num_cpus=2)
    yield made
    ray.shutdown()
    made.shutdown()


@pytest.fixture(autouse=True)
def on(cluster, request):
    """Every test of a class finds the cluster as `self.cluster`."""
    if request.instance is not None:
        request.instance.cluster = cluster


@contextlib.asynccontextmanager
async def place_on(cluster, directory: Path, **config):
    lines: list[str] = []
    settings = {"ray_address": cluster.address, "place_timeout_s": 30.0, **config}
    launcher = RayLauncher(
        SystemClock(),
        b"secret" * 4,
        config=RayTerms(**settings),
        environment={
            "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{DOUBLES}",
            "SCRIPTED_STEP_S": "0.001",
        },
        logs=WorkerLogs(lines.append, directory),
    )
    try:
        await launcher.open()
        yield Place(launcher, directory, lines)
    finally:
        await launcher.close(timeout_s=0.1)


class TestRayLauncher(LauncherConformance):
    TIMEOUT_S = 120.0

    def open(self, directory: Path):
        return place_on(self.cluster, directory)


def run(check, cluster, directory, **config) -> None:
    async def with_place() -> None:
        async with asyncio.timeout(200), place_on(cluster, directory, **config) as place:
            await check(place)

    asyncio.run(with_place())


def node_of(worker) -> str:
    return worker._process._node


def test_workers_spread_over_the_nodes_as_their_resources_ask(cluster, tmp_path) -> None:
    async def check(place: Place) -> None:
        workers = [await place.start(name) for name in ("a", "b")]
        for worker in workers:
            await worker.wait_ready()
            assert await answer(worker) == scripted_text(3, 3, 9)
        assert len({node_of(worker) for worker in workers}) == 2, "each takes a whole node"
        with pytest.raises(WorkerUnavailable, match="no place on the cluster"):
            await place.start("c")

    run(check, cluster, tmp_path, ray_resources={"CPU": 2.0}, place_timeout_s=5.0)


def test_a_killed_actor_takes_its_worker_along_and_both_come_back(cluster, tmp_path) -> None:
    async def check(place: Place) -> None:
        worker = await place.start()
        await worker.wait_ready()
        running, old = await long_stream(worker), pid_of(worker)
        actor_pid = int(Path(f"/proc/{old}/stat").read_text().rsplit(")", 1)[1].split()[1])
        os.kill(actor_pid, 9)
        assert isinstance((await running.end()).error, StreamBroken)
        wait_gone(old)
        await worker.wait_ready()
        (note,) = worker.backend.status.notes
        assert "its actor died" in note.text
        assert await answer(worker) == scripted_text(3, 3, 9)

    run(check, cluster, tmp_path)


def test_a_lost_node_is_seen_by_the_connection_and_the_worker_moves(cluster, tmp_path) -> None:
    async def check(place: Place) -> None:
        doomed = cluster.add_node(num_cpus=2, resources={"doomed": 1})
        place.launcher._config = RayTerms(ray_resources={"doomed": 0.5}, answer_timeout_s=1.0)
        worker = await place.start()
        await worker.wait_ready()
        before = worker.address
        assert node_of(worker) == doomed.node_id
        worker._process._config = RayTerms(answer_timeout_s=1.0)  # Anywhere else is as good.
        running, loop = await long_stream(worker), asyncio.get_running_loop()
        since = loop.time()
        await asyncio.to_thread(cluster.remove_node, doomed, allow_graceful=False)
        assert isinstance((await running.end()).error, StreamBroken)
        await worker.wait_ready()
        print(f"moved {loop.time() - since:.1f} s after the node began to go")
        assert node_of(worker) != doomed.node_id
        assert worker.address != before
        assert worker.backend.status.restarts == 1
        assert await answer(worker) == scripted_text(3, 3, 9)

    run(check, cluster, tmp_path)


def test_no_cluster_is_the_operators_error(cluster, tmp_path) -> None:
    async def check(place: Place) -> None:
        raise AssertionError

    ray.shutdown()
    with pytest.raises(ConfigError, match=r"fleet\.ray_address: no cluster at '127.0.0.1:1'"):
        run(check, cluster, tmp_path, ray_address="127.0.0.1:1")
