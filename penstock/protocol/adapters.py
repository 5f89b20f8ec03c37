"""What a gateway and a worker say to each other about adapters (LoRA); part of `protocol/worker.py`."""

import msgspec


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load_adapter", omit_defaults=True):
    """Read an adapter and take requests for it from then on, which `Adapters` says. Only for workers that
    have places for some (`ModelInfo.adapter_slots`). Again for one that is there changes nothing.
    """

    name: str
    path: str
    """A directory on the worker's machine, or `http://`, `https://` or `s3://`."""
    digest: str = ""
    """It must have this one; empty: any."""
    is_wanted: bool = False
    """A request for it will come: one that is known and not in memory is read again."""


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Take no more requests for an adapter; those that have it go on."""

    name: str


class KeepAdapters(msgspec.Struct, frozen=True, tag="keep_adapters"):
    """Keep these in memory rather than others, the most wanted first, and read those that are not, as far as
    there is room. Each replaces the one before.
    """

    names: tuple[str, ...]


class AdapterState(msgspec.Struct, frozen=True, array_like=True):
    """An adapter that the worker was told to load."""

    name: str
    path: str
    digest: str = ""
    """Of its files: it decides the bits of answers and of KV blocks."""
    is_loaded: bool = False
    """In memory; else it is read again when a request names it."""
    error: str = ""
    """Why it cannot be had, and requests for it are refused."""


class WorkerAdapters(msgspec.Struct, frozen=True, tag="adapters"):
    """All adapters that were read, or that could not be. Told on every change."""

    adapters: tuple[AdapterState, ...] = ()
    room: int = 0
    """How many, of the size of these, can be in memory at once; 0: not known."""
    read_ms: int = 0
    """What reading one takes; 0: not known."""
