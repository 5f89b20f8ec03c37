"""Two real servers before one Kubernetes workload and one Redis: one of them decides, and when it is killed
the other one does; rollouts are one over both.
"""

import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

pytest.importorskip("kmock")
from kube_cluster import ClusterThread
from redis_process import RedisProcess
from served import Server

pytestmark = [
    pytest.mark.leader,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not RedisProcess.is_installed(), reason="redis-server is not installed"),
]

ADMIN, KEY = "admin-0123456789abcdef", "sk-user-0123456789abcdef"


class Site:
    """Both servers, from one configuration."""

    def __init__(self, place: Path) -> None:
        self.redis, self.cluster = RedisProcess(place), ClusterThread("vllm", 4)
        self.redis.start()
        self.servers = [self.server(place / name) for name in ("one", "two")]
        for each in self.servers:
            each.wait_ready()

    def server(self, place: Path) -> Server:
        place.mkdir()
        where = f"{{namespace: default, service: vllm, api_server: '{self.cluster.url}', account: ''}}"
        model = (
            "{path: penstock-demo-mini, name: river, version: %d, replicas: 0, %s"
            f" discover: [{{engine: vllm, served_model: served, kubernetes: {where}}}]}}"
        )
        scale = "scale: {max: 4, min: 1, in_after_s: 3, pools: [{name: gpu, workload: deployment/vllm}]},"
        (place / "config.yaml").write_text(
            f"models:\n- {model % (1, scale)}\n- {model % (2, '')}\nshared: {{url: '{self.redis.url}'}}\n"
            f"ledger: {{directory: {place / 'ledger'}}}\nserver: {{port: 0}}\n"
        )
        return Server(place, "-c", str(place / "config.yaml"), PENSTOCK_ADMIN_KEY=ADMIN, PENSTOCK_API_KEY=KEY)

    def admin(self, number: int, verb: str, path: str, **body: object) -> httpx2.Response:
        url = self.servers[number].url.removesuffix("/v1") + path
        headers = {"authorization": f"Bearer {ADMIN}"}
        return httpx2.request(verb, url, json=body or None, headers=headers, timeout=60)

    def report(self, number: int) -> dict[str, object]:
        return self.admin(number, "GET", "/admin/scale").json()["models"][0]

    def leads(self) -> int:
        """The one that decides."""
        self.servers[1].until(
            lambda: sum(bool(self.report(number)["leads"]) for number in (0, 1)) == 1, "one leads"
        )
        return next(number for number in (0, 1) if self.report(number)["leads"])

    def ask(self, number: int) -> int:
        url = f"{self.servers[number].url}/completions"
        body = {"model": "river", "prompt": "The river", "max_tokens": 4}
        return httpx2.post(url, json=body, headers={"authorization": f"Bearer {KEY}"}, timeout=60).status_code

    def close(self) -> None:
        for each in self.servers:
            each.close()
        self.cluster.close()
        self.redis.kill()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    found = Site(tmp_path)
    yield found
    found.close()


def test_one_decides_and_when_it_is_killed_the_other_one_does(site: Site) -> None:
    replicas = lambda: site.cluster.cluster.replicas("vllm")
    first = site.leads()
    other = 1 - first
    survivor = site.servers[other]
    assert site.report(other)["leader"] == site.report(first)["leader"] != ""
    # An order at the one that follows is carried out by the one that leads.
    ordered = site.admin(other, "POST", "/admin/scale", model="river@1", workers=3)
    assert ordered.status_code == 200, ordered.text
    survivor.until(lambda: replicas() == 3, "three are ordered")
    survivor.until(lambda: site.report(other)["ready"] == 3, "three are ready, by the follower too")
    refused = site.admin(other, "POST", "/admin/scale", model="river@1", workers=9)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "workers")
    # Rollouts are one over both, wherever they are begun.
    begun = site.admin(other, "POST", "/admin/rollouts", model="river", candidate="river@2")
    assert begun.status_code == 200, begun.text

    def rollouts(number: int) -> list[str]:
        found = site.admin(number, "GET", "/admin/rollouts").json()["rollouts"]
        return [f"{each['id']} {each['state']}" for each in found]

    survivor.until(lambda: rollouts(first) == rollouts(other) != [], "both know it")
    again = site.admin(first, "POST", "/admin/rollouts", model="river", candidate="river@2")
    assert again.status_code == 400
    before = site.cluster.cluster.annotation("vllm", "penstock.dev/leader")
    site.servers[first].process.kill()
    killed = time.monotonic()
    survivor.until(lambda: site.report(other)["leads"], "the other one decides")
    assert time.monotonic() - killed < 60
    assert site.report(other)["override"]["workers"] == 3, "what was ordered before holds"
    assert rollouts(other)[0].endswith("running")
    ordered = site.admin(other, "POST", "/admin/scale", model="river@1", workers=4)
    assert ordered.status_code == 200, ordered.text
    survivor.until(lambda: replicas() == 4, "it can order")
    assert int(site.cluster.cluster.annotation("vllm", "penstock.dev/leader")) > int(before)
    # By load again: nothing comes, so workers leave one by one, and requests are answered meanwhile.
    assert site.admin(other, "POST", "/admin/scale", model="river@1").status_code == 200
    survivor.until(lambda: site.ask(other) == 200 and replicas() < 4, "one has left")
    aborted = site.admin(other, "POST", "/admin/rollouts/river/abort")
    assert aborted.json()["rollouts"][0]["state"] == "aborted"


def test_without_the_store_the_pods_stay_and_requests_are_answered(site: Site) -> None:
    first = site.leads()
    site.admin(first, "POST", "/admin/scale", model="river@1", workers=2)
    site.servers[0].until(lambda: site.cluster.cluster.replicas("vllm") == 2, "two are ordered")
    site.redis.kill()
    site.servers[0].until(lambda: not any(site.report(n)["leads"] for n in (0, 1)), "nobody decides")
    assert site.ask(0) == site.ask(1) == 200
    refused = site.admin(0, "POST", "/admin/scale", model="river@1", workers=4)
    assert refused.status_code in (429, 503), refused.text
    assert site.cluster.cluster.replicas("vllm") == 2, "the old state keeps serving"
    site.redis.start()
    site.leads()
