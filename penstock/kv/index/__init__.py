"""Which worker has which part of a prompt in its KV cache? The router's view of all workers' blocks."""
