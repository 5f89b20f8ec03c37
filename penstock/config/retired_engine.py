"""Retired keys of the models, the engine, the fleet, the server, the relay, the ledger and the log (see retired.py)."""

RETIRED_ENGINE: dict[str, str] = {
    "models[].engine.pin_threads": "threads are not pinned, which is slower beside other work (docs/engine.md)",
}
