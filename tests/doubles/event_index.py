"""An index of the KV cache that is kept from its events alone, and compared with what is really there."""

from array import array
from collections.abc import Iterable, Sequence

from penstock.kv.cache.manager import KVManager
from penstock.kv.events import DEVICE, HOST, AllBlocksCleared, BlockStored, KVEvent, KVEventLog
from penstock.kv.hashing import PUBLIC, BlockHash


class EventIndex:
    """A sink for one manager's events. In every tier a name belongs to one namespace, for good."""

    def __init__(self, kv: KVManager) -> None:
        self.owner_of: dict[bytes, bytes] = {}
        """The namespace of every name that was ever told."""
        self.known: dict[str, set[bytes]] = {DEVICE: set(), HOST: set()}
        self._kv, self._log = kv, KVEventLog("public")
        kv.pool.events = self

    def stored(
        self,
        hashes: Sequence[BlockHash],
        first: int,
        end: int,
        tokens: "array[int]",
        *,
        owner: bytes,
        adapter: str = "",
    ) -> None:
        for block_hash in hashes[first:end]:
            assert self.owner_of.setdefault(block_hash, owner) == owner, "a name in two namespaces"
        self._log.stored(hashes, first, end, tokens, owner=owner, adapter=adapter)

    def copied(self, block_hash: BlockHash, *, medium: str) -> None:
        assert block_hash in self.owner_of, "a copy of what was never stored"
        self._log.copied(block_hash, medium=medium)

    def removed(self, hashes: Sequence[BlockHash], *, medium: str = DEVICE) -> None:
        self._log.removed(hashes, medium=medium)

    def cleared(self) -> None:
        self._log.cleared()

    def check(self) -> None:
        """Assert that whoever heard all events knows what can be hit, in each tier."""
        self._apply(self._log.take())
        assert self.known[DEVICE] == set(self._kv.pool.names())
        assert self.known[HOST] == set(self._kv.host.names())

    def _apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                for known in self.known.values():
                    known.clear()
                continue
            assert event.medium is not None
            known, reported = self.known[event.medium], {*event.block_hashes}
            if isinstance(event, BlockStored):
                known |= reported
                owners = {self.owner_of[each] for each in reported}
                assert len(owners) == 1, "an event is of one namespace"
                assert not event.token_ids or owners == {PUBLIC}, "only public tokens are told"
            else:
                assert reported <= known, "removed but never stored"
                known -= reported
