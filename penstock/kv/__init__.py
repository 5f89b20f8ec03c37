"""KV blocks: their hashes, the pool that counts them, and who holds which. Pure: no tensors here."""
