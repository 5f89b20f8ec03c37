"""How much of the machine's memory the KV cache may have, and what context that allows.

How the C library gives memory out in a worker: settings for a process that lives long and must not grow. Left
alone, glibc keeps what large tensors leave behind on its heap, in one heap per thread, and the more the
larger they were: a step that needs no more than the largest one did at start-up may still find no hole that
fits. Then the heap grows.
"""

import ctypes
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import psutil

from penstock.config.tree import EngineConfig
from penstock.errors import ConfigError
from penstock.kv.hashing import token_array
from penstock.models.spec import DecoderSpec
from penstock.schedule.plan import SCORED_TOKENS_MAX, NewRow, RowWork, StepPlan
from penstock.types import BLOCK_TOKENS, RequestId, SamplingParams

CPU_KV_BYTES_MAX = 4 * 1024**3
"""The KV cache takes no more than this of a CPU's memory unless `kv_memory_bytes` says so."""
CPU_KV_FRACTION = 0.3
GPU_KV_FRACTION = 0.92
"""Of what is left when weights, buffers and the largest step have had theirs: nothing else lives there."""
HOST_KV_BYTES_MAX = 4 * 1024**3
"""The host tier takes no more than this unless `host_kv_memory_bytes` says so."""
HOST_KV_FRACTION = 0.1
"""Share of the free memory that the host tier takes, likewise."""
ADAPTER_BYTES_MAX = 4 * 1024**3
"""Adapters take no more than this unless `adapter_memory_bytes` says so."""
ADAPTER_FRACTION = 0.1
"""Share of the free memory that adapters may take, likewise."""
_CGROUP = Path("/sys/fs/cgroup")


@dataclass(slots=True, frozen=True)
class KVBudget:
    """The KV cache that the memory allows."""

    num_blocks: int
    max_model_len: int
    """Tokens of prompt and answer together that one request may have."""


def free_memory_bytes() -> int:
    """Memory that this process may still take: the machine's, or its control group's where that is less."""
    free = psutil.virtual_memory().available
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
    except (OSError, ValueError):
        return free  # No control group, or one without a limit ("max").
    return min(free, max(limit - used, 0))


@dataclass(slots=True, frozen=True)
class Share:
    """The KV cache's part of the free memory if no setting gives it."""

    fraction: float
    bytes_max: int | None
    """More is not taken unless `kv_memory_bytes` says so; None: there is no such bound."""


CPU_SHARE = Share(CPU_KV_FRACTION, CPU_KV_BYTES_MAX)
GPU_SHARE = Share(GPU_KV_FRACTION, None)


def plan_kv(
    config: EngineConfig,
    spec: DecoderSpec,
    *,
    bytes_per_value: int,
    free_bytes: int,
    share: Share = CPU_SHARE,
    draft_spec: DecoderSpec | None = None,
) -> KVBudget:
    """Choose the number of blocks, and settle the context length.

    A draft model (`draft_spec`) has as many blocks, in the same memory.

    Raises:
        ConfigError: a setting that is impossible on this machine or with this model, by its name.
    """
    asked_len = config.max_model_len or spec.max_position
    if asked_len > spec.max_position:
        raise ConfigError(
            f"engine.max_model_len is {asked_len}, but the model was made for {spec.max_position} tokens at "
            f"most"
        )
    block_bytes = block_bytes_of(config, spec, bytes_per_value)
    if draft_spec is not None:
        block_bytes += block_bytes_of(config, draft_spec, bytes_per_value)
    num_blocks = _affordable_bytes(config, free_bytes, share) // block_bytes
    if not config.kv_memory_bytes:
        # More than every request at its longest would never be used up.
        num_blocks = min(num_blocks, config.max_running * _blocks(asked_len))
    source = "engine.kv_memory_bytes" if config.kv_memory_bytes else f"{share.fraction:.0%} of what is free"
    if config.max_model_len and num_blocks < _blocks(asked_len):
        raise ConfigError(
            f"{source} leaves {num_blocks * BLOCK_TOKENS} tokens of KV cache ({block_bytes} bytes per "
            f"{BLOCK_TOKENS} tokens), but engine.max_model_len is {asked_len}: raise the first or lower the "
            f"second"
        )
    if num_blocks < 2:
        raise ConfigError(
            f"{source} leaves no room for a KV cache: {block_bytes} bytes per {BLOCK_TOKENS} tokens"
        )
    return KVBudget(num_blocks, min(asked_len, num_blocks * BLOCK_TOKENS))


def plan_host_blocks(
    config: EngineConfig, spec: DecoderSpec, *, bytes_per_value: int, free_bytes: int
) -> int:
    """How many blocks the host tier of the KV cache holds; 0 for none.

    Raises:
        ConfigError: the settings ask for more memory than there is.
    """
    if not config.prefix_cache:
        return 0  # Nothing in it would ever be found.
    asked = config.host_kv_memory_bytes
    if asked is not None and asked > free_bytes:
        raise ConfigError(f"engine.host_kv_memory_bytes is {asked}, but only {free_bytes} bytes are free")
    given = min(int(free_bytes * HOST_KV_FRACTION), HOST_KV_BYTES_MAX) if asked is None else asked
    return given // block_bytes_of(config, spec, bytes_per_value)


def plan_adapter_bytes(config: EngineConfig, *, free_bytes: int, taken_bytes: int) -> int:
    """Memory that adapters may take, where the KV cache and its host tier take `taken_bytes` of what is free;
    0 where none are taken.

    Raises:
        ConfigError: the setting asks for more memory than is left.
    """
    if not config.adapter_slots:
        return 0
    left, asked = max(0, free_bytes - taken_bytes), config.adapter_memory_bytes
    if asked is not None and asked > left:
        raise ConfigError(f"engine.adapter_memory_bytes is {asked}, but only {left} bytes are left for it")
    return min(int(free_bytes * ADAPTER_FRACTION), ADAPTER_BYTES_MAX, left) if asked is None else asked


def block_bytes_of(config: EngineConfig, spec: DecoderSpec, bytes_per_value: int) -> int:
    """Bytes of one KV block over all layers."""
    if config.kv_dtype == "fp8":
        bytes_per_value = 1
    return BLOCK_TOKENS * spec.kv_bytes_per_token(bytes_per_value, rounded=config.kv_dtype == "int8")


def _affordable_bytes(config: EngineConfig, free_bytes: int, share: Share) -> int:
    if config.kv_memory_bytes > free_bytes:
        raise ConfigError(
            f"engine.kv_memory_bytes is {config.kv_memory_bytes}, but only {free_bytes} bytes are free"
        )
    if config.kv_memory_bytes:
        return config.kv_memory_bytes
    affordable = int(free_bytes * (share.fraction))
    return affordable if share.bytes_max is None else min(affordable, share.bytes_max)


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)


MMAP_BYTES_MIN = 256 * 1024
"""Blocks from this size on are mapped one by one, and given back as soon as they are free. Steps make few:
what is large and needed in every step is scratch that was made at start-up."""
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

_log = logging.getLogger(__name__)


def own_memory_bytes() -> int:
    """The private memory of this process: without pages of files, which the system can drop."""
    resident, shared = Path("/proc/self/statm").read_text().split()[1:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def trim_malloc() -> None:
    """Give back what the C library keeps of freed memory."""
    library = ctypes.CDLL(None)
    if hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


def settle_malloc() -> bool:
    """Make peak memory depend on what is in use at once, and not on what was.

    False where the C library is another.

    Call it first: it does not change what has been given out.
    """
    library = ctypes.CDLL(None)
    if not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        _log.info(
            "the C library is not glibc: peak memory may grow after start-up by what its allocator keeps"
        )
        return False
    settings = {_M_MMAP_THRESHOLD: MMAP_BYTES_MIN, _M_TRIM_THRESHOLD: 2 * MMAP_BYTES_MIN, _M_ARENA_MAX: 1}
    accepted = [library.mallopt(name, value) for name, value in settings.items()]
    return all(accepted)


# The step that takes the most memory: run at start-up, so that none after it has to ask for more.

_EVERYTHING = SamplingParams(
    temperature=1.0,
    top_p=0.9999,
    min_p=0.01,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(1,),
    logprobs=20,
)


class StepBounds(Protocol):
    """The largest step."""

    @property
    def max_running(self) -> int:
        """Rows of the batch, as `resolve_max_running` bounds them."""
        ...

    @property
    def step_tokens(self) -> int:
        """Tokens of one step."""
        ...

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        ...


def largest_step(limits: StepBounds, num_blocks: int) -> StepPlan:
    """As many rows as may run, all of which draw with every parameter there is, and as many tokens as fit the
    rest.

    Takes rows and blocks from 0 on; nothing may be live in them.
    """
    count = min(limits.max_running, num_blocks)
    longest = min(limits.max_model_len - 1, (num_blocks // count) * BLOCK_TOKENS)
    lengths = [min(limits.step_tokens // count, longest)] * count
    # The first takes what is left of the tokens, as far as its blocks go.
    left = num_blocks - (count - 1) * -(-lengths[0] // BLOCK_TOKENS)
    rest = limits.step_tokens - sum(lengths[1:])
    lengths[0] = min(rest, limits.max_model_len - 1, left * BLOCK_TOKENS)
    new_rows: list[NewRow] = []
    work: list[RowWork] = []
    block = 0
    for row, length in enumerate(lengths):
        blocks = tuple(range(block, block + -(-length // BLOCK_TOKENS)))
        block += len(blocks)
        new_rows.append(
            NewRow(RequestId(f"largest-{row}"), row, token_array([0] * length), length, _EVERYTHING)
        )
        work.append(RowWork(row, 0, length, samples=True, new_blocks=blocks))
    return StepPlan(0, tuple(new_rows), tuple(work))


def blocks_of(plan: StepPlan) -> int:
    """Blocks that a plan of new rows takes."""
    return sum(len(work.new_blocks) for work in plan.work)


def scoring_step(limits: StepBounds, num_blocks: int) -> StepPlan:
    """One row whose prompt is scored: as many rows of logits as a step ever computes for that.

    Takes the first row and blocks from 0 on, like `largest_step`.
    """
    longest = max(1, limits.max_model_len - 2)  # The prompt is one token longer.
    count = min(SCORED_TOKENS_MAX, limits.step_tokens, longest, num_blocks * BLOCK_TOKENS)
    prompt = token_array([0] * (count + 1))
    new = NewRow(RequestId("scored"), 0, prompt, count + 1, SamplingParams(prompt_logprobs=20))
    work = RowWork(
        0, 0, count, samples=False, new_blocks=tuple(range(-(-count // BLOCK_TOKENS))), scores=True
    )
    return StepPlan(0, (new,), (work,))
