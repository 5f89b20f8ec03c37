"""A model that an `LLM` loads in a second."""

from penstock.config.checkpoints import resolve

MINI = resolve("penstock-demo-mini")
SMALL = {"dtype": "float32", "threads": 1, "kv_cache_memory_bytes": 16 << 20, "max_num_seqs": 8}
