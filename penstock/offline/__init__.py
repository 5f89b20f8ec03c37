"""How does a Python program use a model without a server? The engine as a library: `LLM` and `AsyncLLM`."""
