"""Admission by prediction, through real sockets: what docs/overload.md says a client sees when the large
model is saturated.

The worker computes one answer at a time, a token in 80 ms of a clock that only the test moves: what is
learned and predicted does not depend on how fast this machine is.
"""

import asyncio
import json
import re
import select
from pathlib import Path

import msgspec
import pytest
from tenant_keys import add
from told_script import NEVER_S

from penstock.clock import NS_PER_MS, NS_PER_S, ManualClock
from penstock.config.routing import AdmissionConfig, ModelRoute, RoutingConfig, TtftTarget
from penstock.config.tenancy import TenantConfig, TierConfig
from penstock.policy.terms import QueueTerms

PAGE = Path(__file__).parents[2] / "docs" / "overload.md"
STEP_MS = 80
ANSWER_TOKENS = 5
"""0.4 s of the worker's time."""
LARGE, SMALL = "tiny", "small"
TENANTS = {"crowd": "", "pro": "pro", "vip": "vip", "strict": "strict"}
"""And their tiers. Those of vip go first, so what waits of them is before everybody."""


class Pending:
    """A request that was sent, and its response once it is here."""

    def __init__(self, raw) -> None:
        self._raw = raw
        self._answer: tuple[int, dict[str, str], dict] | None = None

    def answer(self) -> tuple[int, dict[str, str], dict]:
        """Status, headers in lower case, and JSON."""
        if self._answer is None:
            head, _, body = self._raw.read_all().partition(b"\r\n\r\n")
            self._raw.close()
            lines = head.decode().split("\r\n")
            headers = {
                name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])
            }
            self._answer = int(lines[0].split()[1]), headers, json.loads(body)
        return self._answer

    def is_here(self) -> bool:
        """Whether something of the response is."""
        return self._answer is not None or bool(select.select([self._raw.socket], [], [], 0)[0])

    def answer_or_nothing(self) -> tuple[int, dict[str, str], dict]:
        """Zero and nothing while it waits or runs."""
        return self.answer() if self.is_here() else (0, {}, {})

    def close(self) -> None:
        self._raw.close()


class World:
    """A gateway with a large and a small model, on a clock of the test's."""

    def __init__(self, kit, start, path) -> None:
        self._kit, keys = kit, path / "keys"
        self.keys = {tenant: add(keys, tenant=tenant).key for tenant in TENANTS}
        config = msgspec.structs.replace(
            kit.replace(kit.make_config(), auth={"keys_file": str(keys)}, limits={"concurrent_max": 1000}),
            tiers=(
                TierConfig(name="pro"),
                TierConfig(name="vip", band="priority"),
                TierConfig(name="strict", degrade="never"),
            ),
            tenants=tuple(TenantConfig(id=tenant, tier=tier) for tenant, tier in TENANTS.items()),
            queue=QueueTerms(worker_credit=0, extra_per_row=0),
            routing=RoutingConfig(models=(ModelRoute(model=LARGE, fallback=SMALL),)),
            admission=AdmissionConfig(
                ttft_target_ms=0,
                targets=tuple(TtftTarget(tier=tier, ttft_ms=8000) for tier in ("pro", "strict")),
            ),
        )
        self.clock = ManualClock()
        self.running = start(config, step_s=NEVER_S, max_running=1, small=True, clock=self.clock)
        self._all: list[Pending] = []

    def send(self, tenant: str, *, model: str = LARGE, prompt: str = "", **headers: object) -> Pending:
        """A request that is decided about when this returns."""
        prompt = prompt or f"{len(self._all):06}"
        body = {"model": model, "prompt": prompt, "max_tokens": ANSWER_TOKENS}
        lines = [f"x-penstock-{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        data = self._kit.post("/v1/completions", body, "Connection: close", *lines, key=self.keys[tenant])
        accepted = self.running.gateway.num_accepted
        made = Pending(self._kit.Raw(self.running).send(data))
        self._all.append(made)
        self.running.wait_until(lambda: self.running.gateway.num_accepted > accepted or made.is_here())
        self._turns(0)
        return made

    def step(self, num: int = 1) -> None:
        """So many steps of both workers, and all that follows from each."""
        for _ in range(num):
            self.clock.advance(STEP_MS * NS_PER_MS)
            self._turns(1)

    def learn(self) -> None:
        """Serve crowds of every size up to six, until the pace of both models is known."""
        for num in (*range(1, 7), *range(1, 7), *range(1, 7), 6, 6, 6):
            for _ in range(num):
                self.send("crowd")
                self.send("crowd", model=SMALL)
            self.step(num * ANSWER_TOKENS)
            assert self.running.gateway.num_accepted == 0

    def saturate(self, num: int) -> None:
        """A request was answered too late just now; the large model's worker is busy, and so many of a
        protected band wait for it.
        """
        for _ in range(30):
            self.send("vip")
        late = self.send("pro", degrade="never")
        while not late.is_here():
            self.step()
        assert late.answer()[0] == 503
        while self.running.gateway.num_accepted < num + 1:
            self.send("vip")
        while self.running.gateway.num_accepted > num + 1:
            self.step()

    def _turns(self, steps: int) -> None:
        async def run() -> None:
            for _ in range(steps):
                for backend in self.running.backends.values():
                    backend._step()
            for _ in range(4):
                await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), self.running.loop).result(10)

    def close(self) -> None:
        for one in self._all:
            one.close()


@pytest.fixture
def world(kit, start, tmp_path):
    made = World(kit, start, tmp_path)
    yield made
    made.close()


def test_what_a_client_sees_when_the_large_model_is_saturated(world) -> None:
    world.learn()
    world.saturate(14)  # Almost 6 s, and pro is promised 8 s, of which a fifth may be spent waiting.
    allowed, left_open = world.send("pro", degrade="allow"), world.send("pro")
    never, strict = world.send("pro", degrade="never"), world.send("strict", degrade="allow")
    in_20_s = world.send("pro", degrade="never", max_wait_ms=20_000)
    in_1_s = world.send("crowd", degrade="never", max_wait_ms=1000)
    patient = world.send("crowd", degrade="never", max_wait_ms=20_000)
    vip = world.send("vip", degrade="allow")
    for refused in (never, strict, in_1_s):
        status, headers, body = refused.answer()
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert "could not answer in time" in body["error"]["message"]
        assert 3 <= int(headers["retry-after"]) <= 12
    world.step(40 * ANSWER_TOKENS)
    for diverted in (allowed, left_open):
        status, headers, body = diverted.answer()
        assert (status, body["model"]) == (200, SMALL)
        assert headers["x-penstock-model"] == SMALL
        assert headers["x-penstock-requested-model"] == LARGE
        assert headers["x-penstock-downgrade"] == "slo"
    for let_in in (patient, vip, in_20_s):
        status, headers, body = let_in.answer()
        assert (status, body["model"], "x-penstock-downgrade" in headers) == (200, LARGE, False)
    assert 0 < int(vip.answer()[1]["x-penstock-queue-ms"]) < int(patient.answer()[1]["x-penstock-queue-ms"])


def test_the_first_retry_after_is_the_time_that_the_page_says(world) -> None:
    world.learn()
    world.saturate(14)
    _, headers, _ = world.send("pro", degrade="never").answer()
    (reported,) = re.findall(r"retry-after: (\d+)", PAGE.read_text())
    assert abs(int(headers["retry-after"]) - int(reported)) <= 1


def test_prefer_takes_the_small_model_when_that_is_much_sooner(world) -> None:
    world.learn()
    world.saturate(2)
    preferred, allowed = world.send("pro", degrade="prefer"), world.send("pro", degrade="allow")
    world.step(10 * ANSWER_TOKENS)
    assert preferred.answer()[1]["x-penstock-downgrade"] == "slo"
    assert preferred.answer()[2]["model"] == SMALL
    assert allowed.answer()[2]["model"] == LARGE, "it is in time"
    idle = world.send("pro", degrade="prefer")
    world.step(ANSWER_TOKENS)
    assert idle.answer()[2]["model"] == LARGE, "it starts at once"


def test_a_refusal_under_overload_does_not_make_the_prompt(world) -> None:
    """A prompt that no context holds is told so on an idle machine; under overload its size is not known
    before it is refused, as everybody is.
    """
    world.learn()
    too_long = {"prompt": "a " * 60_000, "degrade": "never"}
    status, _, body = world.send("pro", **too_long).answer()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
    world.saturate(14)
    began_ns = world.clock.now_ns()
    refused = [world.send("pro", degrade="never"), world.send("pro", **too_long)]
    assert world.clock.now_ns() == began_ns
    for each in refused:
        status, headers, body = each.answer()
        assert (status, body["error"]["code"]) == (429, "overloaded")
        assert int(headers["retry-after"]) >= 1
    status, _, body = world.send("pro", prompt="a " * 60_000, degrade="allow").answer()
    assert (status, body["error"]["code"]) == (400, "context_length_exceeded"), "a fallback is idle"


@pytest.mark.parametrize("header", [{"degrade": "perhaps"}, {"max_wait_ms": "soon"}, {"max_wait_ms": 0}])
def test_a_header_that_says_what_it_cannot_say(world, header) -> None:
    status, _, body = world.send("pro", **header).answer()
    assert (status, body["error"]["code"]) == (400, "invalid_value")
    assert body["error"]["param"].startswith("x-penstock-")


def test_who_comes_back_when_told_is_let_in(world) -> None:
    world.learn()
    world.saturate(8)
    due: list[tuple[int, str]] = []
    for _ in range(40):
        status, headers, _ = world.send("strict").answer_or_nothing()
        if status == 429:
            due.append(world.clock.now_ns() + int(headers["retry-after"]) * NS_PER_S)
    assert len(due) == 40
    let_in = 0
    for at_ns in sorted(due):
        while world.clock.now_ns() < at_ns:
            world.step()
        let_in += world.send("strict").answer_or_nothing()[0] != 429
    assert let_in >= 0.9 * len(due), f"{let_in} of {len(due)}"
