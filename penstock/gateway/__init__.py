"""The OpenAI-compatible front door: HTTP, keys, validation, and the relay of tokens to clients.

`app.py` composes the rooms.
"""
