"""Requests that kill workers: found by who was there, refused for a while, so that one bad prompt does not take a fleet down.

When a worker's process dies, every request on it gets a strike. Most were only there. The prime suspect of a death is the one that was
present at more earlier deaths than anybody else on board (or was alone): whoever was that at `deaths` deaths is convicted, and refused
until `refuse_s` have passed. So somebody who kills a few workers under load, one after the other, convicts nobody, and a prompt that
kills every worker it reaches convicts itself, alone at once, in a crowd when its client tries again. A request that ends well is
exonerated.

Requests are known by the fingerprint of their prompt, which also names tenant and model. Pure; bounded; time is handed in.
"""

import hashlib
import math
from array import array
from collections.abc import Iterable, Sequence

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.health import QuarantineConfig
from penstock.errors import PoisonRequest
from penstock.policy.flow import Arrival

Fingerprint = int


class _Suspect(msgspec.Struct):
    strikes: int = 0
    """Deaths that it was present at."""
    prime: int = 0
    """Of those, the ones where nobody is more likely to be the cause."""
    until_ns: int = 0
    """When all of this is forgotten."""


class Quarantine:
    """One for a gateway."""

    __slots__ = ("_config", "_suspects", "num_convicted")

    def __init__(self, config: QuarantineConfig) -> None:
        self._config = config
        self._suspects: dict[Fingerprint, _Suspect] = {}  # Least recently struck first.
        self.num_convicted = 0
        """Convictions so far."""

    def refusal(self, now_ns: int, arrival: Arrival) -> PoisonRequest | None:
        """See `parts.Poison`. Looks at the prompt only while there are suspects, which is nearly never."""
        if not self._suspects or (name := fingerprint(arrival)) is None:
            return None
        left_s = self.refused_s(now_ns, name)
        if not left_s:
            return None
        return PoisonRequest(
            f"Workers have ended while they computed this prompt. It is refused for another {math.ceil(left_s)} s."
        )

    def died(self, now_ns: int, on_board: Sequence[Arrival]) -> None:
        """See `parts.Poison`."""
        names = [fingerprint(arrival) for arrival in on_board]
        self.strike(now_ns, [name for name in names if name is not None])

    def ended_well(self, arrival: Arrival) -> None:
        """See `parts.Poison`."""
        if self._suspects and (name := fingerprint(arrival)) is not None:
            self.clear(name)

    # --- by fingerprint ------------------------------------------------------------------------------

    def strike(self, now_ns: int, on_board: Iterable[Fingerprint]) -> None:
        """A worker died, with these requests on it."""
        present = sorted(set(on_board))
        before = [self._strikes(now_ns, each) for each in present]
        most = max(before, default=0)
        is_clear = before.count(most) == 1
        for fingerprint, strikes in zip(present, before, strict=True):
            suspect = self._suspects.pop(fingerprint, None) or _Suspect()
            if not strikes:
                suspect = _Suspect()
            suspect.strikes += 1
            if is_clear and strikes == most:
                suspect.prime += 1
                self.num_convicted += suspect.prime == self._config.deaths
            suspect.until_ns = now_ns + round(self._config.refuse_s * NS_PER_S)
            self._suspects[fingerprint] = suspect
        while len(self._suspects) > self._config.suspects_max:
            del self._suspects[next(iter(self._suspects))]

    def clear(self, fingerprint: Fingerprint) -> None:
        """It was none of these."""
        self._suspects.pop(fingerprint, None)

    def refused_s(self, now_ns: int, fingerprint: Fingerprint) -> float:
        """For how many seconds a request is refused; 0: it is not."""
        suspect = self._suspects.get(fingerprint)
        if suspect is None or suspect.prime < self._config.deaths or now_ns >= suspect.until_ns:
            return 0.0
        return (suspect.until_ns - now_ns) / NS_PER_S

    def _strikes(self, now_ns: int, fingerprint: Fingerprint) -> int:
        suspect = self._suspects.get(fingerprint)
        return suspect.strikes if suspect is not None and now_ns < suspect.until_ns else 0


def fingerprint(arrival: Arrival) -> Fingerprint | None:
    """Names model, tenant and prompts; None if nobody told the prompts. One tenant's suspects are never another's."""
    if not arrival.prompts:
        return None
    hasher = hashlib.blake2b(f"{arrival.route}\0{arrival.tenant.id}".encode(), digest_size=8)
    for prompt in arrival.prompts:
        tokens = array("i", prompt).tobytes()
        hasher.update(len(tokens).to_bytes(8, "little") + tokens)
    return int.from_bytes(hasher.digest(), "little")
