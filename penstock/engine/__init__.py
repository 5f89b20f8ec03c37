"""The inference engine: from a step plan to sampled tokens."""
