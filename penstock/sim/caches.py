"""What a simulated gateway knows of its workers' KV caches: the real index, fed by the real block pools' events."""

from collections.abc import Sequence

from penstock import rng
from penstock.config.tree import Config
from penstock.kv.events import KVEvent, KVEventBatch
from penstock.kv.hashing import BlockHash
from penstock.kv.locality import KVLocality
from penstock.kv.prompt_keys import PromptKeyMaker, PromptKeys, own_keys
from penstock.kv.vllm_events import events_of_own
from penstock.policy.decision_log import DecisionLog
from penstock.policy.parts import LeastLoaded, Placement
from penstock.policy.route import Router
from penstock.types import WorkerId

_KEY = b"simulated gateway"


class NamedKeys(PromptKeys):
    """Keys of a prompt whose blocks have names already (prompts.py)."""

    __slots__ = ()

    def __init__(self, maker: PromptKeyMaker, num_tokens: int, names: Sequence[BlockHash]) -> None:
        super().__init__(maker, range(num_tokens))
        self._own = {_KEY: own_keys(names)}


class Caches:
    """One gateway's. Off where placement asks for nothing of it."""

    def __init__(self, config: Config, *, seed: int, gateway: int) -> None:
        self._config, self._seed, self._gateway = config.routing.placement, seed, gateway
        self.is_on = self._config.policy != "least_loaded"
        self.locality = KVLocality(config.kv_index, _KEY)
        self.decisions = DecisionLog(kept_max=self._config.decisions_kept)

    def placement(self, route: str) -> Placement:
        """Of one model."""
        if not self.is_on:
            return LeastLoaded()
        draw = rng.stream(self._seed, f"placement/{self._gateway}/{route}").randrange
        return Router(route, self._config, draw, locality=self.locality, log=self.decisions)

    def keys(self, route: str, num_tokens: int, names: Sequence[BlockHash]) -> PromptKeys:
        """Of a prompt with these block names."""
        return NamedKeys(self.locality.maker(route), num_tokens, names)

    def joined(self, worker: WorkerId, route: str) -> None:
        """A worker is there."""
        if self.is_on:
            self.locality.add(worker, model=route, is_own=True)

    def left(self, worker: WorkerId) -> None:
        """A worker is gone."""
        self.locality.remove(worker)

    def heard(self, worker: WorkerId, events: tuple[KVEvent, ...], *, gap: bool) -> None:
        """Words of a worker about its cache; after a `gap` nothing is believed of what it said before."""
        if (residency := self.locality.get(worker)) is not None:
            if gap:
                residency.restarted()
            residency.hear(events_of_own(KVEventBatch(ts=0.0, events=events)))
