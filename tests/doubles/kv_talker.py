"""A worker of another make, as far as its KV events go: it caches prompts, forgets the ends of old ones, and
tells.
"""

import hashlib
from collections.abc import Sequence

import msgspec

BLOCK = 16


class KVTalker:
    """Speaks vLLM's layout; hashes in a way of its own.

    `batches` are all that it has ever published, by number.
    """

    def __init__(self, *, block_tokens: int = BLOCK, seed: bytes = b"") -> None:
        self.batches: list[bytes] = []
        self.block_tokens = block_tokens
        self._seed = seed
        self._events: list[object] = []
        self._chains: dict[tuple[tuple[int, ...], str, str], list[bytes]] = {}
        self.cached: set[bytes] = set()

    def hashes(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> list[bytes]:
        """What it calls the blocks of a prompt."""
        found, parent, size = list[bytes](), self._seed + f"{salt}/{adapter}".encode(), self.block_tokens
        for i in range(len(tokens) // size):
            parent = hashlib.sha256(parent + repr(list(tokens[i * size : (i + 1) * size])).encode()).digest()
            found.append(parent)
        return found

    def cache(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """Compute a prompt: returns how many of its tokens were cached before."""
        hashes, size = self.hashes(tokens, salt, adapter), self.block_tokens
        hit = next((i for i, each in enumerate(hashes) if each not in self.cached), len(hashes))
        new = hashes[hit:]
        self.cached.update(new)
        if new:
            extra = [
                ([adapter] if adapter else []) + ([salt] if salt and i == 0 else [])
                for i in range(hit, len(hashes))
            ]
            self._events.append({
                "type": "BlockStored",
                "block_hashes": new,
                "parent_block_hash": hashes[hit - 1] if hit else None,
                "token_ids": list(tokens[hit * size : len(hashes) * size]),
                "block_size": size,
                "lora_id": 1 if adapter else None,
                "medium": "GPU",
                "lora_name": adapter or None,
                "extra_keys": [each or None for each in extra],
                "group_idx": 0,
            })  # fmt: skip
        return hit * size

    def forget(self, tokens: Sequence[int], keep: int, salt: str = "", adapter: str = "") -> None:
        """Evict a prompt's blocks from the end, down to `keep` blocks."""
        gone = [each for each in self.hashes(tokens, salt, adapter)[keep:] if each in self.cached]
        self.cached.difference_update(gone)
        if gone:
            self._events.append(
                {"type": "BlockRemoved", "block_hashes": gone[::-1], "medium": "GPU", "group_idx": 0}
            )

    def clear(self) -> None:
        """Drop the whole cache."""
        self.cached.clear()
        self._events.append({"type": "AllBlocksCleared"})

    def publish(self) -> bytes:
        """Put what happened into the next batch."""
        payload = msgspec.msgpack.encode([float(len(self.batches)), self._events, 0])
        self._events.clear()
        self.batches.append(payload)
        return payload

    def blocks_of(self, tokens: Sequence[int], salt: str = "", adapter: str = "") -> int:
        """How many of a prompt's first blocks it has."""
        hashes = self.hashes(tokens, salt, adapter)
        return next((i for i, each in enumerate(hashes) if each not in self.cached), len(hashes))
