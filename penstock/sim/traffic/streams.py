"""Randomness of a simulation: named streams of one seed, each independent of how much the others are used."""

from penstock import rng

_MASK = (1 << 64) - 1


class Streams:
    """Makes and keeps the streams of one run: the same name is the same stream."""

    __slots__ = ("_streams", "seed")

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self._streams: dict[str, rng.Stream] = {}

    def of(self, name: str) -> rng.Stream:
        """The stream of this name; one per part that draws, so that parts do not disturb each other."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = rng.stream(self.seed, f"sim/{name}")
        return found


def mix(one: int, other: int) -> int:
    """A 63-bit number from two, without state: the same two give the same number everywhere.

    The finalizer of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
    OOPSLA 2014).
    """
    value = (one * 0x9E3779B97F4A7C15 + other + 0x632BE59BD9B4E019) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) >> 1
