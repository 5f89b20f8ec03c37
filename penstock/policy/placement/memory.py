"""Which models are asleep so that the others fit the memory that all may have.

    room_for ──> MakeRoom(those that go to sleep first) | NoRoom

Idle models make room, the least recently used first, and no more of them than are needed. A model with work
is never one of them. The memory of each is known before anything is loaded, so the bound is never found out
by exceeding it. Pure.
"""

from collections.abc import Iterable, Sequence

import msgspec


class ModelMemory(msgspec.Struct, frozen=True, kw_only=True):
    """One model, all of its workers together."""

    name: str
    awake: bool
    """It is awake, wakes, or falls asleep just now: its memory is taken."""
    awake_bytes: int
    """Of its processes with weights and KV cache, as planned."""
    asleep_bytes: int
    """Of its processes without."""
    used_ns: int = 0
    """When it last had work."""
    is_idle: bool = False
    """It is awake and has none."""

    @property
    def taken_bytes(self) -> int:
        """The memory that it has now."""
        return self.awake_bytes if self.awake else self.asleep_bytes


class MakeRoom(msgspec.Struct, frozen=True):
    """It fits, once these are asleep."""

    sleep: tuple[str, ...] = ()


class NoRoom(msgspec.Struct, frozen=True):
    """It does not fit, whatever idle model sleeps."""

    missing_bytes: int
    busy: tuple[str, ...] = ()
    """Models with work, which keep it from fitting; none: it is too large for the bound."""


def taken_bytes(models: Iterable[ModelMemory]) -> int:
    """The memory that all have now."""
    return sum(model.taken_bytes for model in models)


def room_for(name: str, models: Sequence[ModelMemory], bound_bytes: int) -> MakeRoom | NoRoom:
    """The steps before the model of this name is woken. O(n log n)."""
    (wanted,) = (model for model in models if model.name == name)
    others = [model for model in models if model.name != name]
    over = wanted.awake_bytes + taken_bytes(others) - bound_bytes
    victims: list[ModelMemory] = []
    for model in sorted((each for each in others if _may_sleep(each)), key=lambda each: each.used_ns):
        if over <= 0:
            break
        victims.append(model)
        over -= _gain(model)
    if over > 0:
        busy = tuple(model.name for model in others if model.awake and not model.is_idle)
        at_best = wanted.awake_bytes + sum(model.asleep_bytes for model in others)
        return NoRoom(over, busy if at_best <= bound_bytes else ())
    for model in reversed(victims[:-1]):  # A large one behind them may have been enough.
        if over + _gain(model) <= 0:
            over += _gain(model)
            victims.remove(model)
    return MakeRoom(tuple(model.name for model in victims))


def _may_sleep(model: ModelMemory) -> bool:
    return model.awake and model.is_idle and _gain(model) > 0


def _gain(model: ModelMemory) -> int:
    return model.awake_bytes - model.asleep_bytes
