"""Parts of `protocol/worker.py`'s messages, each about one thing: what an answer must match, adapters (LoRA),
sleep (`Asleep`, the answer, is there), and what a worker's machine says of itself; and what a worker checks
of a submission before its engine sees it.

Gateways check what clients ask for, and say so in the API's words; but a worker listens on a port, and one
number out of range (a NaN, an id that fits no tensor) would end its process and everyone's requests with it.
"""

import math
from collections.abc import Iterator, Sequence
from urllib.parse import unquote

import msgspec

from penstock.types import SamplingParams

GRAMMAR_BYTES_MAX = 256 * 1024
"""Of one `Grammar.form`: a schema is a part of a request, not a document."""


class Grammar(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The form that the text of an answer must match, from its first token, from a marker on, or behind each
    mark of a call; and how long its reasoning may be.

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


def public(path: str, words: str) -> str:
    """The words about an adapter without the secrets of its address: a signature, a password."""
    authority, _, query = path.partition("://")[2].partition("#")[0].partition("?")
    user = authority.partition("/")[0].rpartition("@")[0]
    # Where there is no port, the client takes the characters behind the last colon for one.
    parts = (user, unquote(user), user.rpartition(":")[2], unquote(user).rpartition(":")[2]) if user else ()
    for secret in (f"?{query}" if query else "", *(f"{part}@" for part in parts)):
        words = words.replace(secret, "") if secret else words
    return words


class UnloadAdapter(msgspec.Struct, frozen=True, tag="unload_adapter"):
    """Take no more requests for an adapter; those that have it continue."""

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
    """The time to read one; 0: not known."""


class Sleep(msgspec.Struct, frozen=True, tag="sleep"):
    """Release the weights and the KV cache, unless there is work: an answer is never cut."""


class Wake(msgspec.Struct, frozen=True, tag="wake"):
    """Load the weights again. To one that is awake it changes nothing."""


class StaysAwake(msgspec.Struct, frozen=True, tag="stays_awake"):
    """It was told to sleep, and has work."""

    requests: int


class GpuReadings(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A GPU's readings of itself; None: it does not."""

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
    """The resources that a worker's process takes of its machine, and its GPU if it has one."""

    rss_bytes: int = 0
    cpu_ms: int = 0
    cgroup_bytes: int = 0
    """Memory of all processes in its cgroup, and the bound on it; 0: not told, no limit."""
    cgroup_limit_bytes: int = 0
    load: float = 0.0
    """Of its machine over a minute, per core."""
    gpu: GpuReadings | None = None


INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
SCALE_MAX = 1000.0
"""Of temperatures, penalties and biases: far more than any model has a use for."""
STOPS_MAX = 1024
"""Stop tokens of one request, and entries of its bias."""
INPUTS_MAX = 2048
"""Texts of one request for vectors, as at OpenAI."""
INPUTS_TOKENS_MAX = 1 << 20
"""Their tokens: as many texts of 512. A query is in each of its pairs, so a small body can ask for more than
any machine has memory for."""
BATCH_TEXTS_MAX = 32
"""Texts of one request that an engine has in its scheduler at once."""

_FLOATS = {
    "temperature": (0.0, SCALE_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-SCALE_MAX, SCALE_MAX),
    "frequency_penalty": (-SCALE_MAX, SCALE_MAX),
    "repetition_penalty": (1 / SCALE_MAX, SCALE_MAX),
}


def sampling_problem(sampling: SamplingParams, vocab_size: int) -> tuple[str, str] | None:
    """The first parameter that the engine cannot compute with, and what is wrong with it; None if there is
    none.
    """
    return next(_problems(sampling, vocab_size), None)


def _problems(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    for name, (low, high) in _FLOATS.items():
        value: float = getattr(sampling, name)
        if not low <= value <= high:  # A NaN is in no range.
            yield name, f"{name} is {value:g}, not between {low:g} and {high:g}"
    integers = (
        ("top_k", sampling.top_k, 0, INT32_MAX),
        ("min_tokens", sampling.min_tokens, 0, INT32_MAX),
        ("max_tokens", sampling.max_tokens, 1, INT32_MAX),
        ("seed", sampling.seed, -INT64_MAX - 1, INT64_MAX),
        ("logprobs", sampling.logprobs or 0, 0, vocab_size),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, 0, vocab_size),
    )
    for name, number, low, high in integers:
        if not low <= number <= high:
            yield name, f"{name} is {number}, not between {low} and {high}"
    if len(sampling.stop_token_ids) > STOPS_MAX:
        yield "stop_token_ids", f"stop_token_ids has {len(sampling.stop_token_ids)} entries, over {STOPS_MAX}"
    if any(not 0 <= token_id <= INT32_MAX for token_id in sampling.stop_token_ids):
        yield "stop_token_ids", f"stop_token_ids has ids outside 0..{INT32_MAX}"
    if any(not 0 <= token_id < vocab_size for token_id, _ in sampling.logit_bias):
        yield "logit_bias", f"logit_bias has token ids outside 0..{vocab_size - 1}"
    if any(not abs(bias) <= SCALE_MAX for _, bias in sampling.logit_bias):
        yield "logit_bias", f"logit_bias has a value beyond {SCALE_MAX:g}"
    if any(not word or not 0 <= min(word) <= max(word) < vocab_size for word in sampling.bad_words):
        yield "bad_words", f"bad_words has an empty word, or token ids outside 0..{vocab_size - 1}"
    if (allowed := sampling.allowed_token_ids) and not 0 <= min(allowed) <= max(allowed) < vocab_size:
        yield "allowed_token_ids", f"allowed_token_ids has ids outside 0..{vocab_size - 1}"
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        yield "logit_bias", "logit_bias has a token id twice"


def changes_logits(sampling: SamplingParams) -> bool:
    """Whether a request's logits are changed before a token is drawn from them."""
    return (
        sampling.repetition_penalty != 1
        or bool(sampling.frequency_penalty or sampling.presence_penalty)
        or bool(sampling.logit_bias)
        or sampling.min_tokens > 0
        or bool(sampling.bad_words or sampling.allowed_token_ids)
    )


def weight_of(weight: float) -> float:
    """The share of a fairness key that counts: what was said, if it is one."""
    return weight if math.isfinite(weight) and 0 < weight <= SCALE_MAX**2 else 1.0


def inputs_problem(num_tokens: int, lengths: Sequence[int], firsts: Sequence[int]) -> tuple[str, str] | None:
    """The field that does not divide a prompt of so many tokens into texts (`Submit.inputs`), and what is
    wrong with it.
    """
    assert lengths, "a prompt of no texts is asked about nothing"
    if len(lengths) > INPUTS_MAX:
        return "inputs", f"there are {len(lengths)} texts, over {INPUTS_MAX}"
    if num_tokens > INPUTS_TOKENS_MAX:
        return "inputs", f"the texts have {num_tokens} tokens, over {INPUTS_TOKENS_MAX}"
    if min(lengths) < 1 or sum(lengths) != num_tokens:
        return "inputs", f"the texts have {sum(lengths)} tokens, the prompt {num_tokens}"
    if firsts and (len(firsts) != len(lengths) or min(firsts) < 0):
        return "firsts", "the first parts of pairs are not as many as the texts"
    if any(first > length for first, length in zip(firsts, lengths, strict=False)):
        return "firsts", "the first part of a pair is longer than the pair"
    return None
