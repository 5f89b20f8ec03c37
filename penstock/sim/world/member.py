"""A worker as the fleet of a simulation knows it."""

from dataclasses import dataclass, field

from penstock.sim.world.kv_event_channel import KVEventChannel
from penstock.sim.world.spec import PoolSpec
from penstock.sim.world.worker import SimWorker


@dataclass(slots=True, eq=False)
class Member:
    """One worker, and how it is reached."""

    worker: SimWorker
    pool: PoolSpec
    since_ns: int
    kv: KVEventChannel
    ready: bool = False
    draining: bool = False
    left: bool = False
    """It drained, and left when it was empty."""
    is_mute: bool = False
    """What it says of itself is lost."""
    late_ns: int = 0
    """What its messages take more than others'."""
    sent_ns: dict[int, int] = field(default_factory=dict[int, int])
    """When the last message of each gateway arrives there: none overtakes another."""
    told_ns: dict[int, int] = field(default_factory=dict[int, int])
