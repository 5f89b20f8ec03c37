"""What a launcher tells a new engine worker: one line of JSON on the worker's standard input.

Standard input, because it holds a secret: arguments and environments can be read by other processes.
The worker keeps reading afterwards; the end of the pipe means that its parent is gone.
"""

import msgspec

from penstock.config.engine_settings import EngineSettings

REAL_RUNNER = "penstock.engine.runner:build_runner"


class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that one worker process needs to start."""

    model_path: str
    """A model directory on this machine; names and hub ids are resolved before."""
    model_name: str
    """What clients call it; told back in `ModelInfo.model`."""
    address: str
    """Where to listen (see protocol/address.py)."""
    shares_port: bool = False
    """The launcher keeps the port of a TCP address (fleet/launchers/process.py), so it is bound with
    SO_REUSEPORT."""
    hash_key: bytes
    """Key of the block-hash chain: a guess at a tenant's prompt cannot be tested without it."""
    key: bytes = b""
    """What gateways must prove to have (protocol/worker_auth.py); empty: whoever can connect is one."""
    engine: EngineSettings = EngineSettings()
    runner: str = REAL_RUNNER
    """`module:factory` of what computes. Tests name their own, so that a process starts at once."""
