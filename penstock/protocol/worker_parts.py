"""Parts of `protocol/worker.py`'s messages, each about one thing: what an answer must match, adapters (LoRA),
sleep (`Asleep`, the answer, is there), and what a worker's machine says of itself.
"""

import msgspec

GRAMMAR_BYTES_MAX = 256 * 1024
"""Of one `Grammar.form`: a schema is a part of a request, not a document."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the text of an answer must match, from its first token, from a marker on, or behind each mark of a
    call; and how long its reasoning may be.

    The engine ends the answer when the grammar is complete. A cut answer ends with "length".
    """

    form: bytes = b""
    """JSON, vLLM's `structured_outputs`: an object with one of `json`, `json_object`, `regex`, `choice` and
    `grammar` (Lark as llguidance reads it, or GBNF); or with `calls`: the `format` in which a model calls
    tools, the `tools` by `name` with their `parameters`, and whether there may be `several` calls in a row.
    Empty: only the reasoning is bounded."""
    opens_with: str = ""
    """The answer may begin with a reasoning, and this mark then (say `<think>`), or without one. Empty: the
    prompt has opened it, if there is a `begins_after`."""
    begins_after: str = ""
    """The reasoning is free text until this marker (say `</think>`), and the grammar begins behind it. Empty:
    there is none."""
    begins_within: int | None = None
    """After so many tokens of reasoning the engine writes the marker itself; None: never."""
    call_mark: str = ""
    """The answer is free text, and the grammar holds behind each match of this regular expression (say
    `<tool_call>`), or from its group "call" on, until it is complete; the answer may end where it is free.
    `\\A` is where the answer begins, behind a reasoning. Empty: the grammar holds to the answer's end."""
    ends_with_calls: bool = False
    """No text follows a call: the answer ends where the grammar is complete."""
    is_optional: bool = False
    """A form that cannot be enforced is passed over, and not refused."""


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


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Let go of the weights and the KV cache, unless there is work: an answer is never cut."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Load the weights again. To one that is awake it changes nothing."""


class StaysAwake(msgspec.Struct, frozen=True, tag="stays_awake"):
    """It was told to sleep, and has work."""

    requests: int


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a GPU says of itself; None: it does not."""

    index: int
    """As the driver counts."""
    util: int | None = None
    """Percent of the time in which a kernel ran."""
    memory_util: int | None = None
    """Percent of the time in which its memory was read or written."""
    used_mib: int | None = None
    free_mib: int | None = None
    power_w: float | None = None
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    xid: int | None = None
    """Of the last error that the driver told of; 0: there was none."""


class DeviceReadings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a worker's process takes of its machine, and its GPU if it has one."""

    rss_bytes: int = 0
    cpu_ms: int = 0
    cgroup_bytes: int = 0
    """Memory of all processes in its cgroup, and the most that they may have; 0: not told, no limit."""
    cgroup_limit_bytes: int = 0
    load: float = 0.0
    """Of its machine over a minute, per core."""
    gpu: GpuReadings | None = None
