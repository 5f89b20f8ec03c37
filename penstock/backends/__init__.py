"""How work reaches a worker and its output comes back: `engine/` is our own protocol, `http/` everybody
else's.
"""
