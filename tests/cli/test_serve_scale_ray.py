"""A real server whose workers are actors on a real Ray cluster: it scales them out and in again under load.

Only `make test-workers` runs this.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from served import Server

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster

pytestmark = [
    pytest.mark.workers,
    pytest.mark.timeout(400),
    # Of Ray's own code, which is not ours to mend.
    pytest.mark.filterwarnings(
        "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"
    ),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
ADMIN, KEY = "admin-0123456789abcdef", "sk-user-0123456789abcdef"


class Place:
    """A cluster of two nodes with room for two workers each, and a server before it."""

    def __init__(self, place: Path) -> None:
        # Else Ray takes the machine's first address, which need not be one that it can talk to itself on.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
        for _ in range(2):
            self.cluster.add_node(num_cpus=2)
        self.place = place
        (place / "config.yaml").write_text(
            "models:\n- {path: penstock-demo-mini, name: river, scale: {max: 3, min: 1, in_after_s: 2},"
            " engine: {threads: 1, dtype: float32, kv_memory_bytes: 33554432, host_kv_memory_bytes: 0}}\n"
            f"fleet: {{launcher: ray, ray_address: '{self.cluster.address}', ray_resources: {{CPU: 1}}}}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\nserver: {{port: 0}}\n"
            "admission: {ttft_target_ms: 0, tpot_target_ms: 0}\n"
        )
        self.server = Server(
            place, "-c", str(place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN, PENSTOCK_API_KEY=KEY
        )
        self.server.wait_ready()
        self.base = self.server.url.removesuffix("/v1")

    def admin(self, verb: str, path: str, **body: object) -> httpx2.Response:
        headers = {"authorization": f"Bearer {ADMIN}"}
        return httpx2.request(verb, self.base + path, json=body or None, headers=headers, timeout=60)

    def num_ready(self) -> int:
        return self.admin("GET", "/scale?model=river").json()["ready"]

    def pids(self) -> set[int]:
        """The worker processes, which are children of Ray's actors."""
        found = set[int]()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                environment = (path.parent / "environ").read_bytes()
            except OSError:  # It has just ended, or is not ours.
                continue
            if b"penstock.engine.worker" in b" ".join(words) and b"RAY_" in environment:
                found.add(int(path.parent.name))
        return found

    def close(self) -> None:
        self.server.process.terminate()
        self.server.wait_ended()
        self.server.close()
        self.cluster.shutdown()


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    found = Place(tmp_path)
    yield found
    found.close()


def test_one_worker_becomes_three_and_one_again_under_load(place: Place) -> None:
    place.server.until(lambda: place.num_ready() == 1, "the first one is ready")
    assert len(place.pids()) == 1
    report = place.place / "bench.json"
    command = [
        sys.executable, "-m", "penstock", "bench", "--url", place.server.url, "--key", KEY,
        "--model", "river", "--concurrency", "6", "--duration", "20", "--output-tokens", "64",
        "--json", str(report),
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as bench:
        try:
            assert place.admin("POST", "/admin/scale", model="river", workers=3, for_s=600).status_code == 200
            place.server.until(lambda: place.num_ready() == 3, "three are ready")
            assert len(place.pids()) == 3, "each in an actor of its own"
            assert bench.poll() is None, "the load goes on"
            assert place.admin("POST", "/admin/scale", model="river", workers=1, for_s=600).status_code == 200
            place.server.until(lambda: len(place.pids()) == 1, "two have left the cluster")
        finally:
            said, _ = bench.communicate()
    assert bench.returncode == 0, said
    (level,) = json.loads(report.read_text())["levels"]
    assert level["requests_failed"] == 0, "no stream was cut"
    assert level["requests_ok"] > 6
    moves = place.admin("GET", "/admin/scale?model=river").json()["models"][0]["moves"]
    assert [each["move"] for each in moves][:2] == ["in", "out"]
