"""A worker's load, read from its own Prometheus metrics by their real names.

    engine   running                       waiting                             KV cache in use
    vllm     vllm:num_requests_running     vllm:num_requests_waiting        vllm:kv_cache_usage_perc (0 to 1)
    sglang   sglang:num_running_reqs       sglang:num_queue_reqs               sglang:token_usage
    tgi      tgi_batch_current_size        tgi_queue_size                      (not told)
    trtllm   trtllm_num_requests_running   trtllm_num_requests_waiting         trtllm_kv_cache_utilization
    triton   (not told)                    nv_inference_pending_request_count  (not told)

vLLM also tells which adapters are in use (`vllm:lora_requests_info`).

A metric that is expected and not there is missing, which is reported; it is never read as zero. Pure: text
in, numbers out, within bounds on both.
"""

import math
from bisect import insort
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

LINES_MAX = 50_000
LINE_BYTES_MAX = 16 * 1024
SAMPLES_MAX = 4096
"""Kept of the metrics that are looked for."""
TIMED_MAX = 64


@dataclass(slots=True, frozen=True)
class Sample:
    """One line of the text format: a value with its labels."""

    labels: Mapping[str, str]
    value: float


Samples = Mapping[str, list[Sample]]


@dataclass(slots=True, frozen=True, kw_only=True)
class LoadNames:
    """An engine's names for its load.

    Several names: older and newer versions, the first that is there counts. None: it has no such metric, so
    none is missed.
    """

    running: tuple[str, ...] | None
    waiting: tuple[str, ...] | None
    kv_usage: tuple[str, ...] | None
    """A share of 1."""
    kv_tokens: tuple[str, ...] | None = None
    """Tokens that the KV cache holds at most; not expected."""
    kv_info: tuple[str, str, str] | None = None
    """The same, as a metric and its labels for the number of blocks and the tokens of one."""
    model_label: str = ""
    """The label that names the model, where one server has several."""
    adapters: tuple[str, str, str, str] | None = None
    """A metric whose samples name adapters in their labels: of requests that ran, and that waited, separated
    by commas; and how many it keeps loaded. The value is the time when that was so last. It comes with the
    first request for one."""

    def all(self) -> frozenset[str]:
        """Every name that is looked for."""
        groups = (
            self.running,
            self.waiting,
            self.kv_usage,
            self.kv_tokens,
            self.kv_info and self.kv_info[:1],
            self.adapters and self.adapters[:1],
        )
        return frozenset(name for group in groups for name in group or ())


LOAD_NAMES: Mapping[str, LoadNames] = {
    "vllm": LoadNames(
        running=("vllm:num_requests_running",),
        waiting=("vllm:num_requests_waiting",),
        kv_usage=("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
        kv_info=("vllm:cache_config_info", "num_gpu_blocks", "block_size"),
        adapters=("vllm:lora_requests_info", "running_lora_adapters", "waiting_lora_adapters", "max_lora"),
        model_label="model_name",
    ),
    "sglang": LoadNames(
        running=("sglang:num_running_reqs", "sglang_num_running_reqs"),
        waiting=("sglang:num_queue_reqs", "sglang_num_queue_reqs"),
        kv_usage=("sglang:token_usage", "sglang_token_usage"),
        kv_tokens=("sglang:max_total_num_tokens", "sglang_max_total_num_tokens"),
        model_label="model_name",
    ),
    "tgi": LoadNames(running=("tgi_batch_current_size",), waiting=("tgi_queue_size",), kv_usage=None),
    "trtllm": LoadNames(
        running=("trtllm_num_requests_running",),
        waiting=("trtllm_num_requests_waiting",),
        kv_usage=("trtllm_kv_cache_utilization",),
    ),
    "triton": LoadNames(
        running=None, waiting=("nv_inference_pending_request_count",), kv_usage=None, model_label="model"
    ),
}
"""By engine. A provider has no metrics for its customers."""


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineLoad:
    """A worker's report of its load. None: it did not say."""

    running: int | None = None
    waiting: int | None = None
    kv_usage: float | None = None
    """From 0 to 1."""
    kv_tokens: int | None = None
    """The capacity of its KV cache."""
    adapters: tuple[str, ...] | None = None
    """The adapters used last, the most recent at the end, as many as it keeps loaded."""
    adapters_max: int = 0
    """How many it keeps loaded; 0: it does not say."""
    missing: tuple[str, ...] = ()
    """Names of metrics that were expected and not there."""


def parse_metrics(text: bytes, names: Iterable[str], *, timed: str = "") -> Samples:
    """The samples of these metrics in a page of Prometheus' text format (version 0.0.4) or of OpenMetrics.

    Of the metric `timed`, whose values are times, only the newest `TIMED_MAX` samples are kept: old ones stay
    on the page for good. Lines that cannot be read, and values that are no finite number, are left out: what
    they should have said is missing.

    Raises:
        ValueError: there are more lines than `LINES_MAX`, or more samples than `SAMPLES_MAX`.
    """
    wanted = {name.encode(): name for name in names}
    found: dict[str, list[Sample]] = {}
    lines = text.split(b"\n", LINES_MAX)
    if len(lines) > LINES_MAX:
        raise ValueError(f"a page of metrics of more than {LINES_MAX} lines")
    num_samples = 0
    for line in lines:
        name = wanted.get(_name_of(line))
        if name is None or len(line) > LINE_BYTES_MAX or (sample := _sample_of(line, len(name))) is None:
            continue
        if name == timed:
            kept = found.setdefault(name, [])
            insort(kept, sample, key=_value)
            del kept[:-TIMED_MAX]
            continue
        num_samples += 1
        if num_samples > SAMPLES_MAX:
            raise ValueError(f"more than {SAMPLES_MAX} samples of the metrics that are looked for")
        found.setdefault(name, []).append(sample)
    return found


def load_of(samples: Samples, names: LoadNames, *, model: str = "") -> EngineLoad:
    """An engine's load.

    Of a server with several models, `model`'s; several engines of one model are added up.
    """
    missing: list[str] = []

    def of(group: tuple[str, ...] | None, *, expected: bool = True) -> list[float] | None:
        if group is None:
            return None
        for name in group:
            if values := [
                sample.value for sample in _of_model(samples.get(name, ()), names.model_label, model)
            ]:
                return values
        if expected:
            missing.append(group[0])
        return None

    running, waiting, usage = of(names.running), of(names.waiting), of(names.kv_usage)
    kv_tokens = _count(of(names.kv_tokens, expected=False)) or _reported_tokens(samples, names)
    return EngineLoad(
        running=_count(running),
        waiting=_count(waiting),
        kv_usage=None if usage is None else min(1.0, max(0.0, sum(usage) / len(usage))),
        kv_tokens=kv_tokens,
        adapters=_adapters(samples, names),
        adapters_max=_adapters_max(samples, names),
        missing=tuple(missing),
    )


def _of_model(samples: Iterable[Sample], label: str, model: str) -> Iterator[Sample]:
    """Those of the model; those without the label count too."""
    return (
        sample for sample in samples if not label or not model or sample.labels.get(label, model) == model
    )


def _count(values: list[float] | None) -> int | None:
    return None if values is None else max(0, round(sum(values)))


def _reported_tokens(samples: Samples, names: LoadNames) -> int | None:
    """Tokens of a KV cache whose size is in labels."""
    if names.kv_info is None:
        return None
    metric, blocks, tokens = names.kv_info
    series = [sample.labels for sample in samples.get(metric, ())]
    return sum(_digits(labels.get(blocks, "")) * _digits(labels.get(tokens, "")) for labels in series) or None


def _adapters(samples: Samples, names: LoadNames) -> tuple[str, ...] | None:
    """The adapters used last, oldest first; None: it does not say."""
    if names.adapters is None or not (series := samples.get(names.adapters[0])):
        return None
    _, running, waiting, _ = names.adapters
    used: dict[str, None] = {}
    for sample in sorted(series, key=_value):
        words = f"{sample.labels.get(waiting, '')},{sample.labels.get(running, '')}".split(",")
        for name in filter(None, words):
            used.pop(name, None)
            used[name] = None
    count = _adapters_max(samples, names)
    return tuple(used)[-count:] if count else ()


def _adapters_max(samples: Samples, names: LoadNames) -> int:
    if names.adapters is None or not (series := samples.get(names.adapters[0])):
        return 0
    return _digits(series[0].labels.get(names.adapters[3], ""))


def _value(sample: Sample) -> float:
    return sample.value


def _digits(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 else 0


def _name_of(line: bytes) -> bytes:
    for i, byte in enumerate(line[:256]):
        if byte in b"{ \t":
            return line[:i]
    return b""


def _sample_of(line: bytes, start: int) -> Sample | None:
    try:
        rest = line[start:].decode()
        labels: dict[str, str] = {}
        if rest.startswith("{"):
            labels, rest = _labels(rest)
        value = float(rest.split()[0])  # A time stamp or an exemplar may follow.
    except (UnicodeDecodeError, ValueError, IndexError):
        return None
    return Sample(labels, value) if math.isfinite(value) else None


def _labels(text: str) -> tuple[dict[str, str], str]:
    r"""Labels in braces, and what follows them. Values are quoted; \\, \" and \n are escaped.

    Raises:
        ValueError: they do not end.
        IndexError: the same.
    """
    labels: dict[str, str] = {}
    at = 1
    while text[at] != "}":
        if text[at] in ", ":
            at += 1
            continue
        end = text.index("=", at)
        name, at = text[at:end].strip(), end + 1
        if text[at] != '"':
            raise ValueError("a label's value is not quoted")
        value: list[str] = []
        at += 1
        while text[at] != '"':
            if text[at] == "\\":
                at += 1
                value.append({"n": "\n"}.get(text[at], text[at]))
            else:
                value.append(text[at])
            at += 1
        labels[name] = "".join(value)
        at += 1
    return labels, text[at + 1 :]
