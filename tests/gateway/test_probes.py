"""A worker that computes wrongly is found by its probes, gets nothing more, and comes back when right."""

import re
import urllib.request
from collections.abc import Iterator

import msgspec
import pytest
from fake_backend import FakeBackend, endless_words

from penstock.backends.base import GenerateRequest, Note
from penstock.errors import EngineFault
from penstock.policy.resilience.anomalies import Standing
from penstock.protocol.worker import FaultCount, Stats
from penstock.types import WorkerId

CHAT = "/v1/chat/completions"
WORKERS = [WorkerId(f"tiny-{i}") for i in range(4)]


def of_the_platform(request: GenerateRequest) -> bool:
    return request.fairness_key == "platform"


class Held(FakeBackend):
    """Requests stand still there after some words, on demand; probes go on."""

    is_held = False

    def held(self) -> list:
        return [
            each
            for each in self._streams.values()
            if each.num_tokens >= 5 and not of_the_platform(each._request)
        ]

    def _step(self) -> None:
        self._timer = None
        held = self.held() if self.is_held else []
        for stream in list(self._streams.values()):
            if stream not in held:
                stream.step()
        if self._streams and self._timer is None:
            self._schedule()


def words_of(client) -> str:
    """What the answer, whole or as a stream, says."""
    answer = client.read_all()
    client.close()
    body = answer.partition(b"\r\n\r\n")[2]
    if body.startswith(b"{"):
        return msgspec.json.decode(body)["choices"][0]["message"]["content"]
    events = [msgspec.json.decode(line) for line in re.findall(rb"data: (\{.*\})", body)]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


@pytest.fixture
def pool(kit) -> Iterator:
    """A gateway before four equal workers; those in `damaged` answer wrongly."""

    class Pool(kit.RunningGateway):
        async def make_backends(self):
            self.damaged, self.asked = set[str](), {worker: [] for worker in WORKERS}
            return {"tiny": [self.worker(worker) for worker in WORKERS]}

        def worker(self, worker: WorkerId) -> FakeBackend:
            def script(request: GenerateRequest) -> Iterator[str]:
                self.asked[worker].append(request)
                return iter(["?"] * 99) if worker in self.damaged else endless_words(request)

            backend = Held(self.clock, script=script, max_running=8)
            backend.status.info = msgspec.structs.replace(backend.status.info, identity="one and the same")
            return backend

        def beat(self) -> None:
            """Ticks until all probes that are due by now were answered."""
            prober = self.gateway._policies.prober
            self.call(self.gateway._dispatcher.tick)
            self.call(prober.tick)
            self.wait_until(lambda: not prober._running)
            self.call(prober.tick)

        def watched(self, worker: WorkerId):
            return self.call(lambda: self.gateway._policies.prober.anomalies.get(worker))

        def until(self, standing: str, worker: WorkerId) -> None:
            for _ in range(10_000):
                if self.watched(worker).standing == standing:
                    self.call(self.gateway._policies.prober.tick)  # What it has found is carried out.
                    return
                self.beat()
            raise AssertionError(f"{worker} does not become {standing}")

    Pool.key = kit.KEY
    config = kit.replace(kit.make_config(), health={"probe_s": 0.02}, limits={"concurrent_max": 64})
    config = kit.replace(config, auth={"admin_keys": (kit.KEY,)}, admission=kit.NO_PROMISES)
    running = Pool(config)
    yield running
    running.stop()


def ask(pool, path: str, body: object = None) -> bytes:
    data = None if body is None else msgspec.json.encode(body)
    headers = {"authorization": f"Bearer {pool.key}", "content-type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(pool.url + path, data, headers), timeout=20) as answer:
        return answer.read()


def test_damage_is_found_and_the_worker_left_alone_until_it_is_right_again(pool, kit):
    while not all(pool.asked.values()):
        pool.beat()
    for requests in pool.asked.values():
        assert all(of_the_platform(each) and each.sampling.logprobs == 5 for each in requests)
        assert len({each.cache_salt for each in requests}) == len(requests), "what is cached is not computed"
    pool.damaged = {WORKERS[2]}
    pool.until("ejected", WORKERS[2])
    for _ in range(8):
        ask(pool, CHAT, kit.chat(max_tokens=2))
    workers = msgspec.json.decode(ask(pool, "/admin/workers"))["workers"]
    shown, page = {each["id"]: each for each in workers}, ask(pool, "/metrics").decode()
    assert all(of_the_platform(each) for each in pool.asked[WORKERS[2]]), "nothing but probes"
    assert any(not of_the_platform(each) for each in pool.asked[WORKERS[0]])
    bad, good = shown[WORKERS[2]], shown[WORKERS[0]]
    assert (bad["standing"], bad["probe"]) == ("ejected", "wrong")
    assert bad["left_alone"].startswith("it is ejected: log-probabilities are")
    assert (good["standing"], good["probe"], good["left_alone"]) == ("well", "right", "")
    assert 'penstock_anomalous_workers{cause="wrong",model="tiny"} 1.0' in page
    assert 'penstock_ejections_total{cause="wrong",model="tiny"} 1.0' in page
    assert 'penstock_worker_weight_ratio{model="tiny",worker="tiny-2"} 0.0' in page
    counted = re.search(r'penstock_requests_total{endpoint="chat",model="tiny",outcome="length"} (\d+)', page)
    assert int(counted[1]) <= 8, "a probe is no request"
    pool.damaged = set()
    pool.until("well", WORKERS[2])
    assert pool.log_text.getvalue().count("a worker's standing has changed") >= 3


@pytest.mark.parametrize("stream", [True, False])
def test_what_runs_on_an_ejected_worker_goes_on_at_another_one(pool, kit, stream):
    """Word for word as if nothing had happened."""
    while not all(pool.asked.values()):
        pool.beat()
    bad, num = pool.backend[2], 26  # Three workers take 24.
    for backend in pool.backend:
        backend.is_held = True
    body = kit.post(CHAT, kit.chat(max_tokens=40, seed=1, stream=stream), "Connection: close")
    clients = [kit.Raw(pool).send(body) for _ in range(num)]
    pool.wait_until(lambda: sum(len(backend.held()) for backend in pool.backend) == num)
    num_there = len(pool.call(bad.held))
    pool.damaged = {WORKERS[2]}
    pool.until("ejected", WORKERS[2])
    pool.call(pool.gateway._dispatcher.tick)
    assert (num_there >= 2, pool.call(bad.held)) == (True, [])
    for backend in pool.backend:
        backend.is_held = False
    said = [words_of(client) for client in clients]
    assert len(said[0]) > 40
    assert said == said[:1] * num, "those that were moved are as those that were not"
    page = ask(pool, "/metrics").decode()
    assert f'penstock_migrations_total{{model="tiny"}} {num_there}.0' in page
    assert f'outcome="length"}} {num}' in page, "each has ended once"
    assert "streams leave a worker" in pool.log_text.getvalue()


def test_with_nowhere_to_go_streams_stay_where_they_are(pool, kit):
    """The others are full: what waited there would wait longer than it takes where it is."""
    while not all(pool.asked.values()):
        pool.beat()
    for backend in pool.backend:
        backend.is_held = True
    body = kit.post(CHAT, kit.chat(max_tokens=40, seed=1), "Connection: close")
    clients = [kit.Raw(pool).send(body) for _ in range(60)]
    bad, queue = pool.backend[2], pool.gateway._dispatcher.control.model_queue("tiny").queue
    pool.wait_until(lambda: queue.num_waiting + sum(len(each.held()) for each in pool.backend) == 60)
    assert queue.num_waiting
    num_there = len(pool.call(bad.held))

    def is_slow() -> None:
        watched = pool.gateway._policies.prober.anomalies.get(WORKERS[2])
        watched.standing, watched.cause, watched.since_ns = Standing.EJECTED, "slow", pool.clock.now_ns()
        watched.out_ns = 10**12
        pool.gateway._dispatcher.tick()

    pool.call(is_slow)
    assert len(pool.call(bad.held)) == num_there >= 8
    for backend in pool.backend[:2]:
        backend.is_held = False
    pool.wait_until(lambda: not pool.gateway._dispatcher.tick() and not bad.held())
    pool.backend[3].is_held = False
    assert len({words_of(client) for client in clients}) == 1


def test_a_fault_is_wrong_a_lost_worker_says_nothing_and_slow_ones_are_told(pool):
    """What each probe brings is kept: the next one comes by itself, 20 ms later, and is right."""
    pool.beat()
    prober, worker = pool.gateway._policies.prober, WORKERS[1]
    anomalies, received = prober.anomalies, list[tuple[WorkerId, str, str, str]]()
    judge = anomalies.probed

    def probed(now_ns: int, worker_id: WorkerId, answer: object, **words: str) -> str:
        verdict = judge(now_ns, worker_id, answer, **words)
        found = anomalies.get(worker_id)
        received.append((worker_id, verdict, found.standing.value, found.why))
        return verdict

    anomalies.probed = probed

    def fail() -> None:
        prober._send(pool.clock.now_ns(), worker)
        stream = next(iter(pool.backend[1]._streams))
        pool.backend[1].fail(stream, EngineFault("the logits are not numbers"))

    pool.call(fail)
    pool.wait_until(lambda: any(each[:2] == (worker, "wrong") for each in received))
    (why,) = (each[3] for each in received if each[1] == "wrong")
    assert "not numbers" in why

    def lose() -> None:
        prober._send(pool.clock.now_ns(), WORKERS[3])
        pool.backend[3].lose_worker("it is gone")

    pool.call(lose)
    pool.wait_until(lambda: (WORKERS[3], "it is gone", "well") in [each[:3] for each in received])

    def break_machine() -> None:
        pool.backend[0].status.faults["xid"] = FaultCount(1, "Xid 79 of this GPU")
        pool.backend[0].status.notes.append(Note("an older thing", 0))
        pool.backend[0].on_change()
        pool.backend[0].on_change()

    pool.call(break_machine)
    page = ask(pool, "/metrics").decode()
    assert 'penstock_worker_faults_total{kind="xid",model="tiny"} 1.0' in page
    (line,) = (each for each in pool.log_text.getvalue().splitlines() if "a fault of a worker's" in each)
    assert 'why="Xid 79 of this GPU"' in line

    def report() -> int:
        pool.backend[0].status.stats = Stats(
            step=9, running=0, waiting=0, blocks_total=4, blocks_used=0, blocks_cached=0,
            timed_steps=9, timed_tokens=9, timed_sequences=9, timed_kv_read=90, timed_ns=10**7,
        )  # fmt: skip
        pool.backend[0].on_change()
        pool.gateway._dispatcher.tick()
        group = prober.anomalies.get(WORKERS[0]).group
        return prober.anomalies._groups[group]._peers[WORKERS[0]].sums.ns  # Until the window is over.

    assert pool.call(report) == 10**7
