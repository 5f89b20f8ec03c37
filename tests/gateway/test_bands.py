"""Who goes next, through real sockets: bands, floors, starvation and fair shares, in the order in which a
worker sees its requests.

The examples are those of docs/overload.md, "Who goes next".
"""

import re
from pathlib import Path

import msgspec
import pytest
from tenant_keys import add
from told_script import NEVER_S, JumpingClock, ToldScript

from penstock.config.tenancy import TenantConfig
from penstock.policy.terms import QueueTerms, band_terms

PAGE = Path(__file__).parents[2] / "docs" / "overload.md"


class Crowd:
    """Tenants with keys, and their requests; each request is known by its seed."""

    def __init__(self, kit, start, path, tenants, *, slots: int, queue: QueueTerms | None = None) -> None:
        self._kit, self._keys = kit, {}
        path /= "keys"
        for tenant in tenants:
            self._keys[tenant.id] = add(path, tenant=tenant.id).key
        config = kit.replace(
            kit.make_config(),
            auth={"keys_file": str(path)},
            limits={"concurrent_max": 100},
            admission={"ttft_target_ms": 0, "targets": ()},
        )
        queue = msgspec.structs.replace(queue or QueueTerms(), worker_credit=0)
        config = msgspec.structs.replace(config, tenants=tuple(tenants), queue=queue)
        self.script, self.clock = ToldScript(), JumpingClock()
        self.running = start(config, self.script, step_s=NEVER_S, max_running=slots, clock=self.clock)
        self._sockets = []
        self._tenant_of: list[str] = []

    def ask(
        self,
        tenant: str,
        num: int = 1,
        *,
        prompt_tokens: int = 3,
        max_tokens: int = 1000,
        headers=(),
        **asked,
    ) -> list[int]:
        """Requests that are accepted one after the other; their seeds."""
        seeds = []
        for _ in range(num):
            seed = len(self._tenant_of)
            body = {
                "model": "tiny",
                "prompt": f"{seed:03}".ljust(prompt_tokens, "x"),
                "max_tokens": max_tokens,
                "seed": seed,
            } | asked
            self._sockets.append(self._kit.Raw(self.running))
            data = self._kit.post("/v1/completions", body, *headers, key=self._keys[tenant])
            accepted = self.running.gateway.num_accepted
            self._sockets[-1].send(data)
            self.running.wait_until(lambda limit=accepted: self.running.gateway.num_accepted > limit)
            self._tenant_of.append(tenant)
            seeds.append(seed)
        return seeds

    def wait_started(self, num: int) -> None:
        self.running.wait_until(lambda: len(self.script.started) >= num)

    def next_after(self, *seeds: int) -> list[str]:
        """Let these end, each after what took the place of the one before has begun; whose requests those
        were.
        """
        before = len(self.script.started)
        for num, seed in enumerate(seeds, 1):
            self.script.ended.add(seed)
            self.step()
            self.wait_started(before + num)
        return [self._tenant_of[seed] for seed in self.script.started[before:]]

    def drain(self, num: int) -> list[str]:
        """On a worker with one slot, whose answers have one token: whose requests the next `num` are."""
        before = len(self.script.started)
        for started in range(before, before + num):
            self.step()
            self.wait_started(started + 1)
        return [self._tenant_of[seed] for seed in self.script.started[before:]]

    def drained(self, num: int) -> list[int]:
        """The same, as seeds."""
        self.drain(num)
        return self.script.started[-num:]

    def step(self) -> None:
        self.running.call(self.running.backend._step)

    def close(self) -> None:
        for one in self._sockets:
            one.close()


@pytest.fixture
def crowd(kit, start, tmp_path):
    made = []

    def make(*tenants: TenantConfig, slots: int, queue: QueueTerms | None = None) -> Crowd:
        made.append(Crowd(kit, start, tmp_path, tenants, slots=slots, queue=queue))
        return made[-1]

    yield make
    for one in made:
        one.close()


def patient(**bands) -> QueueTerms:
    """The default bands, in which nobody's wait ends; and what a band has of its own."""
    return QueueTerms(
        bands=tuple(
            msgspec.structs.replace(band, timeout_s=10_000, **bands.get(band.name, {}))
            for band in map(band_terms, QueueTerms().bands)
        ),
        extra_per_row=0,
    )


BANDS = [TenantConfig(id=band, band=band) for band in ("priority", "default", "bulk")]


def test_forty_slots_of_three_bands(crowd) -> None:
    """The example of docs/overload.md."""
    made = crowd(*BANDS, slots=40, queue=patient())
    running = {name: made.ask(name, num) for name, num in (("priority", 28), ("default", 9), ("bulk", 3))}
    made.wait_started(40)
    made.ask("bulk", 2)
    made.ask("default", 6)
    made.ask("priority", 30)
    ends = iter(running["priority"])
    places = [made.next_after(next(ends))[0] for _ in range(28)]
    # 1. Every band runs its floor of the slots, and has had its floor of the starts.
    first = places.index("default")
    assert set(places[:first]) == {"priority"}
    assert first >= 4
    # 2. Then it is owed one, and again after so many that a fifth of the starts are its own.
    assert places[first + 1 : first + 4] == ["priority"] * 3


def test_a_band_without_a_floor_has_one_place_when_its_clock_has_run_out(crowd) -> None:
    made = crowd(*BANDS, slots=40, queue=patient(bulk={"floor": 0.0}, default={"floor": 0.0}))
    running = made.ask("priority", 40)
    made.wait_started(40)
    for name in ("bulk", "default", "priority"):
        made.ask(name, 8)
    assert made.next_after(*running[:3]) == ["priority"] * 3
    # Nothing ended all the while here, so the clocks of the others ran out before, and they are more overdue.
    made.clock.jump(121)
    assert made.next_after(*running[3:6]) == ["priority", "default", "bulk"]
    assert made.next_after(*running[6:9]) == ["priority"] * 3


def test_a_floor_is_lent_while_its_band_has_no_work(crowd) -> None:
    made = crowd(*BANDS, slots=10, queue=patient(default={"floor": 3}))
    (first, *_) = made.ask("bulk", 12)
    made.wait_started(10)
    assert len(made.script.started) == 10, "nothing stands idle for default"
    made.ask("default", 5)
    assert made.next_after(first, *range(1, 5)) == ["default"] * 5
    assert made.next_after(5) == ["bulk"]


def one_slot(crowd, *tenants: TenantConfig, **bands):
    """A worker that computes one answer at a time, each of one token, and is busy with somebody else's."""
    made = crowd(TenantConfig(id="holder", band="system"), *tenants, slots=1, queue=patient(**bands))
    made.ask("holder", max_tokens=1)
    made.wait_started(1)
    return made


def test_tenants_are_served_alike_whatever_the_size_of_their_requests(crowd) -> None:
    made = one_slot(crowd, TenantConfig(id="big"), TenantConfig(id="small"))
    made.ask("big", 4, prompt_tokens=1000, max_tokens=1)
    made.ask("small", 11, prompt_tokens=300, max_tokens=1)
    (line,) = re.findall(r"^    start +([a-z ]+) \.\.\.", PAGE.read_text(), re.MULTILINE)
    expected = line.split()
    assert len(expected) >= 10
    assert made.drain(len(expected)) == expected


def test_a_tenant_of_four_times_the_weight_starts_four_times_as_often(crowd) -> None:
    made = one_slot(crowd, TenantConfig(id="heavy", weight=4.0), TenantConfig(id="light"))
    made.ask("light", 4, max_tokens=1)
    made.ask("heavy", 12, max_tokens=1)
    order = made.drain(15)
    assert [order[at : at + 5].count("heavy") for at in (0, 5, 10)] == [4, 4, 4]


def test_who_comes_back_has_earned_nothing_by_idling(crowd) -> None:
    made = one_slot(crowd, TenantConfig(id="idle"), TenantConfig(id="busy"))
    made.ask("busy", 8, max_tokens=1)
    assert made.drain(4) == ["busy"] * 4
    made.ask("idle", 4, max_tokens=1)
    assert made.drain(6).count("idle") == 3


def test_priority_orders_a_tenants_own_requests_and_no_others(crowd) -> None:
    made = one_slot(crowd, TenantConfig(id="a"), TenantConfig(id="b"))
    usual = made.ask("a", 2, max_tokens=1)
    others = made.ask("b", 2, max_tokens=1)
    first = made.ask("a", max_tokens=1, priority=-100)
    last = made.ask("a", max_tokens=1, priority=7)
    order = made.drained(6)
    assert [seed for seed in order if seed not in others] == [*first, *usual, *last]
    assert order[0] in others, "b's has waited longer"
    assert sum(seed in others for seed in order[:4]) == 2
