"""Retired keys of models, engine, fleet, server, relay, ledger and log (see retired.py)."""

RETIRED_ENGINE: dict[str, str] = {
    "models[].engine.pin_threads": "removed: pinned threads were slower (docs/engine.md)",
    "server.connections_max": "fixed at 20000 for each process; `limits.concurrent_max` bounds the streams",
    "server.header_bytes_max": "fixed at 32 KiB",
    "server.headers_max": "fixed at 100",
    "server.header_timeout_s": "fixed at 15",
    "server.body_timeout_s": "fixed at 60",
    "server.keepalive_timeout_s": "fixed at 75",
    "relay.*": "how text travels to clients is in `server` (docs/relay.md)",
    "relay.buffer_bytes_max": "fixed at 1 MiB for each client",
    "relay.slow_client": "moved to `server.slow_client`",
    "relay.write_timeout_s": "fixed at 30",
    "relay.flush_ms": "moved to `server.flush_ms`",
    "relay.heartbeat_s": "fixed at 15",
}
