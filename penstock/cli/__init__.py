"""The `penstock` command: `commands/` is what can be typed, `wiring/` builds running processes of a
configuration.
"""
