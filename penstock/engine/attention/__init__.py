"""Paged attention: the contract, a plain reference and the CPU implementation."""
