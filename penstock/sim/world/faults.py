"""Failures as data: which, when, how long, where; and `Chaos`, which carries them out. Each kind has a
beginning, and an end unless it is to stay.
"""

import enum
from collections.abc import Sequence

import msgspec

from penstock.clock import NS_PER_MS
from penstock.sim.world.facts import Member
from penstock.sim.world.messages import Rank
from penstock.sim.world.world import WORLD, World


class FaultKind(enum.StrEnum):
    """The faults that can happen."""

    WORKER_CRASH = "worker-crash"
    """A worker is gone at once; another is started in its place."""
    WORKER_SLOW = "worker-slow"
    """Its steps take `amount` times as long."""
    GRAY = "gray-failure"
    """It reports that all is well, and fails every request that it is given."""
    STUCK = "stuck-stream"
    """The next request that it is given sends nothing any more, until that one is aborted."""
    LATE = "late-messages"
    """Messages to and from it take `amount` milliseconds more."""
    LINK_RESET = "link-reset"
    """A gateway loses its connection to a worker, and what streams over it; both are well."""
    NO_REPORTS = "lost-metrics"
    """Its reports of itself are lost."""
    KV_GAP = "kv-event-gap"
    """Its reports of its cache are lost, until it is connected again: the gateways get what they missed then,
    or ask for it (`KVEventChannel`)."""
    STORE_LOSS = "store-loss"
    """The store of shared limits does not answer; with `amount` over 1 it comes back empty."""
    REGION_LOSS = "region-loss"
    """Gateways and workers of a region are gone; clients go elsewhere."""
    SPOT = "spot-revocation"
    """A worker will be taken away at the end of the fault, and is notified at its begin."""
    BAD_ROLLOUT = "bad-rollout"
    """A part of the workers gets a version with steps `amount` times as long, or, below 1, with answers that
    are not numbers."""
    CLOCK_SKEW = "clock-skew"
    """A gateway's date is `amount` seconds off, the whole run long."""
    GATEWAY_CRASH = "thundering-herd"
    """A gateway is gone; when it is back all its clients ask again at once."""
    POISON = "poison-request"
    """The request with number `target` brings down every worker that computes it."""


class InjectedFault(msgspec.Struct, frozen=True, array_like=True):
    """One failure."""

    kind: FaultKind
    at_ns: int
    until_ns: int
    """0: nothing ends it."""
    target: int
    """Which worker, gateway, region or request, counted from 0 and taken modulo how many there are."""
    amount: float = 1.0


_WHOLE_RUN = (FaultKind.POISON, FaultKind.CLOCK_SKEW)


def clock_skews_s(faults: Sequence[InjectedFault], num_gateways: int) -> tuple[float, ...]:
    """`WorldSpec.clock_skews_s` of a run with these faults: clocks are off from its start."""
    skews = [0.0] * num_gateways
    for fault in faults:
        if fault.kind is FaultKind.CLOCK_SKEW:
            skews[fault.target % num_gateways] = fault.amount
    return tuple(skews)


class Chaos:
    """The faults of one run."""

    def __init__(self, world: World, faults: Sequence[InjectedFault]) -> None:
        self._world = world
        self._hit: dict[InjectedFault, list[Member]] = {}
        world.facts.poison = frozenset(fault.target for fault in faults if fault.kind is FaultKind.POISON)
        for fault in faults:
            if fault.kind not in _WHOLE_RUN:
                world.timeline.at(fault.at_ns, WORLD, Rank.FAULT, self._begin, fault)
                if fault.until_ns:
                    world.timeline.at(fault.until_ns, WORLD, Rank.FAULT, self._end, fault)

    def _begin(self, now_ns: int, fault: InjectedFault) -> None:
        world, kind = self._world, fault.kind
        gateway = world.gateways[fault.target % len(world.gateways)]
        members = self._members(fault)
        self._hit[fault] = members
        match kind:
            case FaultKind.STORE_LOSS:
                if world.store is not None:
                    world.store.down = True
            case FaultKind.REGION_LOSS:
                world.lose_region(now_ns, world.regions[fault.target % len(world.regions)])
            case FaultKind.GATEWAY_CRASH:
                world.lose_gateway(now_ns, gateway)
            case FaultKind.LINK_RESET:
                for member in members:
                    world.reset_link(now_ns, gateway, member)
            case _:
                for member in members:
                    self._hit_worker(now_ns, fault, member)

    def _hit_worker(self, now_ns: int, fault: InjectedFault, member: Member) -> None:
        world, worker = self._world, member.worker
        match fault.kind:
            case FaultKind.WORKER_CRASH:
                world.crash(now_ns, member)
            case FaultKind.SPOT:
                world.drain(now_ns, member)
                world.replace(now_ns, member)
            case FaultKind.WORKER_SLOW:
                worker.change_pace(now_ns, fault.amount)
            case FaultKind.BAD_ROLLOUT:
                worker.change_pace(now_ns, max(1.0, fault.amount), garbage=fault.amount < 1)
            case FaultKind.GRAY:
                worker.fails = True
            case FaultKind.STUCK:
                worker.sticks_next = True
            case FaultKind.LATE:
                member.late_ns = int(fault.amount * NS_PER_MS)
            case FaultKind.NO_REPORTS:
                member.is_mute = True
            case FaultKind.KV_GAP:
                member.kv.is_lost = True
            case _:
                raise AssertionError(f"{fault.kind} is nothing that happens to a worker")

    def _end(self, now_ns: int, fault: InjectedFault) -> None:
        world = self._world
        match fault.kind:
            case FaultKind.STORE_LOSS:
                if world.store is not None:
                    world.store.down = False
                    if fault.amount > 1:
                        world.store.forget()
            case FaultKind.REGION_LOSS:
                world.restore_region(now_ns, world.regions[fault.target % len(world.regions)])
            case FaultKind.GATEWAY_CRASH:
                world.restore_gateway(now_ns, fault.target % len(world.gateways))
            case _:
                for member in self._hit.pop(fault, []):
                    self._spare(now_ns, fault, member)

    def _spare(self, now_ns: int, fault: InjectedFault, member: Member) -> None:
        world, worker = self._world, member.worker
        if worker.is_gone:
            if fault.kind is FaultKind.WORKER_CRASH:
                world.replace(now_ns, member)
            return
        match fault.kind:
            case FaultKind.SPOT:
                world.crash(now_ns, member)
            case FaultKind.WORKER_SLOW | FaultKind.BAD_ROLLOUT:
                worker.change_pace(now_ns, 1.0)
            case FaultKind.GRAY:
                worker.fails = False
            case FaultKind.LATE:
                member.late_ns = 0
            case FaultKind.NO_REPORTS:
                member.is_mute = False
            case FaultKind.KV_GAP:
                world.hear_kv(now_ns, member)
            case _:
                pass

    def _members(self, fault: InjectedFault) -> list[Member]:
        """The workers that it hits: one that is there, or for a rollout about half."""
        members = [each for each in self._world.members.values() if not each.worker.is_gone]
        if not members:
            return []
        if fault.kind is FaultKind.BAD_ROLLOUT:
            return members[fault.target % 2 :: 2]
        return [members[fault.target % len(members)]]
