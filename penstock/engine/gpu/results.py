"""From the device back to the host: what a step drew, in host memory that is read only once the step is
done.
"""

from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.engine.arrays import Int64Array, float_list, int_list
from penstock.engine.gpu.platform import Mark, Platform, Staging
from penstock.engine.gpu.rows import HostRows, HostStep
from penstock.engine.gpu.step import Drawn, RowState, StepBuffer, StepLimits
from penstock.engine.sampler import NOT_NUMBERS
from penstock.schedule.plan import SCORED_TOKENS_MAX, Forced, Sampled, Scored
from penstock.types import TokenLogprob

_ALTERNATIVES = 20


@dataclass(slots=True)
class LogprobTargets:
    """Log-probabilities that were asked for: one per row of logits."""

    counts: list[int]
    """Alternatives of each."""
    targets: Tensor
    """`[n]` int64 on the host, as are the rest: whose log-probability."""
    chosen: Tensor
    ranks: Tensor
    values: Tensor
    """`[n, max(counts)]`"""
    ids: Tensor
    healthy: Tensor

    def at(self, index: int) -> TokenLogprob:
        """One of them."""
        count = self.counts[index]
        pairs = zip(int_list(self.ids[index])[:count], float_list(self.values[index])[:count], strict=True)
        top = tuple(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))
        return TokenLogprob(int(self.targets[index]), float(self.chosen[index]), top, int(self.ranks[index]))


class LogprobReader:
    """Computes log-probabilities on the device and brings them to the host."""

    def __init__(self, platform: Platform, rows: int) -> None:
        """Memory for `rows` with a usual number of alternatives; it grows on demand."""
        self._platform = platform
        sizes = {
            "targets": (rows, torch.int64),
            "chosen": (rows, torch.float32),
            "ranks": (rows, torch.int64),
            "values": (rows * _ALTERNATIVES, torch.float32),
            "ids": (rows * _ALTERNATIVES, torch.int64),
            "healthy": (rows, torch.bool),
        }
        self._host = {name: platform.staging((size,), dtype) for name, (size, dtype) in sizes.items()}

    def read(self, logits: Tensor, targets: Tensor, counts: list[int]) -> LogprobTargets:
        """Start copying those of `targets` `[n]` under the unscaled distributions `[n, vocab_size]`."""
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs.gather(1, targets[:, None])
        ranks = (logprobs > chosen).sum(-1) + 1
        # One at least: what is not asked for is not looked at.
        values, ids = logprobs.topk(min(max(*counts, 1), logits.shape[1]), dim=-1)
        healthy = logits.amax(-1).isfinite()  # A NaN anywhere is the maximum.
        found = {
            "targets": targets, "chosen": chosen[:, 0], "ranks": ranks, "values": values, "ids": ids,
            "healthy": healthy,
        }  # fmt: skip
        return LogprobTargets(counts, **{name: self._to_host(name, tensor) for name, tensor in found.items()})

    def _to_host(self, name: str, tensor: Tensor) -> Tensor:
        host = self._host[name]
        if host.numel() < tensor.numel():
            size = 1 << (tensor.numel() - 1).bit_length()
            host = self._host[name] = self._platform.staging((size,), tensor.dtype)
        view = host[: tensor.numel()].view(tensor.shape)
        return view.copy_(tensor, non_blocking=True)


@dataclass(slots=True, frozen=True)
class ScoredRow:
    """A row of the step whose prompt tokens are scored: its logits are `count` of those that are read."""

    row: int
    count: int


@dataclass(slots=True)
class DeviceFlight:
    """One step under way: what it reads from the host, and where its results arrive.

    Used again when it is collected.
    """

    buffer: StepBuffer
    staging: Staging
    drawn: Drawn
    """On the host."""
    sampled_reader: LogprobReader
    scored_reader: LogprobReader
    step: int = 0
    computes: bool = True
    """Whether there is a step at all, or only copies to wait for."""
    rows: list[int] = field(default_factory=list[int])
    """Rows of the tables that draw."""
    logprobs: dict[int, int] = field(default_factory=dict[int, int])
    """From the place among `rows` to the place in `sampled`, of rows whose log-probability is wanted."""
    sampled: LogprobTargets | None = None
    scored_rows: list[ScoredRow] = field(default_factory=list[ScoredRow])
    scored: LogprobTargets | None = None
    constrained: list[int] = field(default_factory=list[int])
    """Places among `rows` whose draws a grammar has not taken yet."""
    positions: Int64Array = field(default_factory=lambda: np.zeros(0, np.int64))
    """`[len(rows)]` of the drawn tokens, where `constrained` was set."""
    follows: dict[int, Forced | str] = field(default_factory=dict[int, Forced | str])
    """By place among `rows`: what a grammar says of what follows, or why the row cannot continue."""
    mark: Mark | None = None

    @classmethod
    def allocate(cls, platform: Platform, limits: StepLimits) -> "DeviceFlight":
        """Host memory for steps of these limits."""
        pinned = platform.device.type == "cuda"
        return cls(
            buffer=StepBuffer(limits, torch.device("cpu"), pinned=pinned),
            staging=Staging(platform),
            drawn=Drawn(
                platform.staging((limits.max_running,), torch.int32),
                platform.staging((limits.max_running,), torch.bool),
            ),
            sampled_reader=LogprobReader(platform, limits.max_running),
            scored_reader=LogprobReader(platform, SCORED_TOKENS_MAX),
        )

    def clear(self) -> None:
        """Nothing is computed: there will be no results."""
        self.rows, self.scored_rows, self.constrained = [], [], []
        self.follows.clear()

    def read_drawn(self, drawn: Drawn, host: HostStep) -> None:
        """Start copying the drawn tokens."""
        self.rows = cast("list[int]", cast(Any, host.sample_rows).tolist())
        count = len(self.rows)
        self.drawn.token_ids[:count].copy_(drawn.token_ids[:count], non_blocking=True)
        self.drawn.healthy[:count].copy_(drawn.healthy[:count], non_blocking=True)

    def read_logprobs(self, logits: Tensor, drawn: Drawn, wanted: list[int | None]) -> None:
        """Start copying the log-probabilities of drawn tokens; `logits` are the model's own."""
        places = [place for place, row in enumerate(self.rows) if wanted[row] is not None]
        self.logprobs = {place: index for index, place in enumerate(places)}
        self.sampled = None
        if places:
            index = self.staging.put(torch.tensor(places).numpy())
            counts = [wanted[self.rows[place]] or 0 for place in places]
            targets = drawn.token_ids.index_select(0, index).long()
            self.sampled = self.sampled_reader.read(logits.index_select(0, index), targets, counts)

    def read_scores(self, logits: Tensor, targets: Tensor, scored: list[ScoredRow], rows: HostRows) -> None:
        """Start copying the log-probabilities of prompt tokens: `logits` `[sum of counts, vocab_size]`."""
        self.scored_rows, self.scored = scored, None
        counts = [rows.prompt_logprobs[one.row] for one in scored for _ in range(one.count)]
        if counts:
            self.scored = self.scored_reader.read(logits, targets, counts)

    def results(self) -> tuple[tuple[Sampled, ...], tuple[Scored, ...]]:
        """Everything the step found; its mark has been waited for."""
        count = len(self.rows)
        tokens, healthy = int_list(self.drawn.token_ids[:count]), int_list(self.drawn.healthy[:count])
        sampled = tuple(
            self._sampled(place, row, token, bool(ok))
            for place, (row, token, ok) in enumerate(zip(self.rows, tokens, healthy, strict=True))
        )
        return sampled, tuple(self._scores())

    def _sampled(self, place: int, row: int, token: int, healthy: bool) -> Sampled:
        if not healthy:
            return Sampled(row, 0, error=NOT_NUMBERS)
        follows = self.follows.get(place)
        if isinstance(follows, str):
            return Sampled(row, token, error=follows)
        logprob = None
        if self.sampled is not None and place in self.logprobs:
            logprob = self.sampled.at(self.logprobs[place])
        return Sampled(row, token, logprob, forced=follows)

    def _scores(self) -> list[Scored]:
        scored: list[Scored] = []
        first = 0
        for one in self.scored_rows:
            places = range(first, first + one.count)
            first += one.count
            wanted = self.scored
            if wanted is None:
                scored.append(Scored(one.row, ()))
            elif bool(wanted.healthy[places.start : places.stop].all()):
                scored.append(Scored(one.row, tuple(wanted.at(place) for place in places)))
            else:
                scored.append(Scored(one.row, (), error=NOT_NUMBERS))
        return scored


def scored_targets(
    host: HostStep, rows: HostRows, state: RowState, staging: Staging
) -> tuple[Tensor, Tensor, list[ScoredRow]]:
    """Which tokens' logits score a prompt token, those prompt tokens, and whose they are.

    Returns:
        Indices into the step's tokens and target ids, both `[n]` int64 on the device, and the rows in plan
        order.
    """
    starts = (host.num_tokens.cumsum() - host.num_tokens).tolist()
    scored: list[ScoredRow] = []
    tokens: list[int] = []
    places: list[int] = []
    width = state.token_ids.shape[1]
    for index in host.scoring:
        row, first, num_tokens = (int(of[index]) for of in (host.rows, host.computed, host.num_tokens))
        count = min(first + num_tokens + 1, rows.num_prompt[row]) - (first + 1)
        scored.append(ScoredRow(row, count))
        tokens += range(starts[index], starts[index] + count)
        places += range(row * width + first + 1, row * width + first + 1 + count)
    targets = state.token_ids.view(-1).index_select(
        0, staging.put(torch.tensor(places, dtype=torch.int64).numpy())
    )
    return staging.put(torch.tensor(tokens, dtype=torch.int64).numpy()), targets.long(), scored
