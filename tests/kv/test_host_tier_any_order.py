"""Tables, device and host memory under any order of events; contents are followed token by token."""

from collections import Counter
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from penstock import rng
from penstock.kv.cache.host_tier import BlockCopy, Copied, HostLimits
from penstock.kv.cache.manager import BlockTable, KVManager
from penstock.kv.hashing import BlockHasher, token_array

HASHER = BlockHasher(key=bytes(32), identity="m float32")
GARBAGE = object()


@dataclass(eq=False)
class Work:
    table: BlockTable
    tokens: object
    num_computed: int


@dataclass
class Copy:
    copy: BlockCopy
    out: bool
    begin: list[object]
    """What the source held when the copy began."""


class World:
    """A manager, and what really is in every slot of every block. Copies take their time, tear and fail."""

    def __init__(self, num_blocks: int, num_slots: int, loads_max: int, stores_max: int) -> None:
        limits = HostLimits(num_slots=num_slots, idle_ns=10, loads_max=loads_max, stores_max=stores_max)
        self.kv = KVManager.with_prefix_cache(num_blocks, HASHER, limits)
        self.open: list[Work] = []
        self.device: list[list[object]] = [[GARBAGE] * 16 for _ in range(num_blocks)]
        self.host: list[list[object]] = [[GARBAGE] * 16 for _ in range(num_slots)]
        self.copies: list[Copy] = []
        self.now_ns = 0

    def begin(self, salt: bytes, family: int, shared: int, length: int) -> None:
        tokens = token_array([family] * min(shared, length) + [7] * max(0, length - shared))
        table = self.kv.open(salt)
        match = self.kv.match_prefix(table, tokens)
        available = self.kv.num_available_after(match)
        if len(match.loads) > available:
            return
        self.kv.adopt(table, match)
        assert self.kv.pool.num_available == available - len(match.loads)
        assert match.num_tokens < length
        assert len(table.awaits) * 16 == match.num_host_tokens
        self.open.append(Work(table, tokens, match.num_tokens))

    def advance(self, pick: int, count: int) -> None:
        ready = [work for work in self.open if not (work.table.awaits or work.table.broken)]
        if not ready:
            return
        work = ready[pick % len(ready)]
        end = min(work.num_computed + count, len(work.tokens))
        if self.kv.extend(work.table, end) is None:
            return
        for position in range(work.num_computed, end):
            block = work.table.blocks[position // 16]
            self.device[block][position % 16] = (work.table.owner, bytes(work.tokens[: position + 1]))
        self.kv.publish_computed(work.table, work.tokens, end)
        work.num_computed = end

    def release(self, pick: int, *, bad: bool, preempted: bool) -> None:
        if self.open:
            work = self.open.pop(pick % len(self.open))
            unread = work.table.awaits or work.table.broken
            self.kv.release(work.table, bad=bad and not unread, preempted=preempted)

    def wait(self, ns: int) -> None:
        self.now_ns += ns
        self.kv.host.tick(self.now_ns)

    def start_copies(self) -> None:
        copies = self.kv.take_copies()
        self.copies += [Copy(each, True, list(self.device[each.block])) for each in copies.out]
        for each in copies.into:
            self.copies.append(Copy(each, False, list(self.host[each.slot])))
            self.device[each.block] = [GARBAGE] * 16

    def end_copy(self, pick: int, *, ok: bool) -> None:
        """Half of what arrives was read at the beginning, half just now."""
        if not self.copies:
            return
        ended = self.copies.pop(pick % len(self.copies))
        block, slot = ended.copy
        source, target = (self.device[block], self.host[slot])[:: 1 if ended.out else -1]
        target[:] = ended.begin[:8] + source[8:] if ok else [GARBAGE] * 16
        self.kv.finish_copies([Copied(slot, ok)])

    def check(self) -> None:
        self.kv.check_invariants([work.table for work in self.open])
        for work in self.open:
            if work.table.awaits or work.table.broken:
                continue
            for position in range(work.num_computed):
                content = self.device[work.table.blocks[position // 16]][position % 16]
                assert content == (work.table.owner, bytes(work.tokens[: position + 1])), "foreign KV"

    def end(self) -> None:
        """Everything is let go, every copy ends: then nothing is held."""
        while self.open:
            self.release(0, bad=False, preempted=False)
        self.start_copies()
        while self.copies or self.kv.host.busy:
            self.end_copy(0, ok=True)
            self.start_copies()
        self.kv.check_invariants([])
        assert self.kv.statistics().used == 0


picks = st.integers(0, 100)


class HostTierMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 10),
        num_slots=st.integers(0, 8),
        loads_max=st.integers(1, 3),
        stores_max=st.integers(1, 3),
    )
    def start(self, **limits: int) -> None:
        self.world = World(**limits)

    @rule(
        salt=st.sampled_from([b"alice", b"alice", b"bob"]),
        family=st.integers(0, 1),
        shared=st.sampled_from([0, 20, 40, 60]),
        length=st.integers(1, 70),
        count=st.integers(0, 70),
    )
    def begin(self, salt: bytes, family: int, shared: int, length: int, count: int) -> None:
        self.world.begin(salt, family, shared, length)
        self.world.advance(-1, count)

    @rule(pick=picks, count=st.integers(1, 40))
    def advance(self, pick: int, count: int) -> None:
        self.world.advance(pick, count)

    @rule(pick=picks, bad=st.sampled_from([False, False, False, True]), preempted=st.booleans())
    def release(self, pick: int, bad: bool, preempted: bool) -> None:
        self.world.release(pick, bad=bad, preempted=preempted)

    @rule(ns=st.integers(0, 15))
    def start_copies(self, ns: int) -> None:
        self.world.wait(ns)
        self.world.start_copies()

    @rule(pick=picks, ok=st.sampled_from([True, True, True, False]))
    def end_copy(self, pick: int, ok: bool) -> None:
        self.world.end_copy(pick, ok=ok)

    @rule(really=st.integers(0, 4))
    def clear_cache(self, really: int) -> None:
        if not really:
            self.world.kv.clear_cache()

    @invariant()
    def consistent(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestHostTierMachine = HostTierMachine.TestCase
TestHostTierMachine.settings = settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],  # A busy machine is no reason to fail.
)


def run_trace(seed: int) -> Counter[str]:
    """One long run from a seed; returns how often what is hard to get right really happened."""
    chance = rng.stream(seed, "host tier trace")
    world = World(chance.randint(5, 12), chance.randint(2, 12), chance.randint(1, 4), chance.randint(1, 4))
    actions = {
        "begin": lambda: world.begin(
            chance.choice([b"alice", b"bob"]),
            chance.randrange(2),
            chance.choice([0, 20, 40, 60]),
            chance.randint(1, 70),
        ),
        "advance": lambda: world.advance(chance.randrange(100), chance.randint(1, 40)),
        "release": lambda: world.release(
            chance.randrange(100), bad=not chance.randrange(20), preempted=chance.random() < 0.5
        ),
        "start": world.start_copies,
        "end": lambda: world.end_copy(chance.randrange(100), ok=bool(chance.randrange(10))),
        "wait": lambda: world.wait(chance.randint(0, 15)),
        "clear": world.kv.clear_cache,
    }
    seen: Counter[str] = Counter()
    for _ in range(1500):
        name = chance.choices(list(actions), [8, 12, 8, 8, 14, 3, 0.2])[0]
        actions[name]()
        world.check()
        seen["shared load"] += any(len(tables) > 1 for tables in world.kv._waiting.values())
        seen["load of nobody"] += any(
            not each.out and each.copy.slot not in world.kv._waiting for each in world.copies
        )
    now = world.kv.host.statistics()
    world.end()
    names = ("stores", "loads", "evictions", "discarded", "failures")
    return seen + Counter({name: getattr(now, name) for name in names})


@pytest.mark.parametrize("seeds", [range(6), range(6, 12)], ids=str)
def test_long_traces_end_with_nothing_held(seeds) -> None:
    seen = sum((run_trace(seed) for seed in seeds), Counter())
    wanted = {"stores", "loads", "evictions", "discarded", "failures", "shared load", "load of nobody"}
    assert not wanted - set(seen), seen
