"""KV blocks: how they are named, and the events of their lives.

`cache/` is one engine's, `index/` the router's view. Pure.
"""
