"""Penstock: an LLM serving platform that keeps overload boring."""

__version__ = "0.1.0"
