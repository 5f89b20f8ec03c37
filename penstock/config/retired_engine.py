"""Retired keys of models, engine, fleet, server, relay, ledger and log (see retired.py)."""

RETIRED_ENGINE: dict[str, str] = {
    "models[].engine.pin_threads": "removed: pinned threads were slower (docs/engine.md)",
}
