"""From the device back to the host: what a step drew, in host memory that is read only once the step is done;
and the grammars of a device's rows, whose steps are launched before the host knows what the ones before have
drawn.

    launch     the step's forward pass is queued; then the host waits for the draws of the steps before, takes
               them, and sends the masks of this step's draws, which are queued behind
    collect    takes the step's draws, if no later launch had to

So masks are computed while the device computes, and only steps that draw for a grammar wait. A device
remembers its draws at once, so a token that is known beforehand is drawn from a mask of one bit, and forced
tokens that follow are written to the row's tokens behind the draw.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.engine.adjustments import Masks
from penstock.engine.arrays import Int64Array, as_tensor, float_list, int_list
from penstock.engine.gpu.platform import Mark, Platform, Staging
from penstock.engine.gpu.rows import HostRows, HostStep
from penstock.engine.gpu.step import Drawn, RowState, StepBuffer, StepLimits
from penstock.engine.sampler import NOT_NUMBERS
from penstock.schedule.plan import SCORED_TOKENS_MAX, Forced, Sampled, Scored, StepPlan
from penstock.types import TokenLogprob

if TYPE_CHECKING:
    from penstock.engine.grammar.compiler import GrammarTokens

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


_THREADS = 2


class DeviceGrammars:
    """Those of one runner."""

    def __init__(self, tokens: "GrammarTokens", state: RowState) -> None:
        self._state = state
        from penstock.engine.grammar.rows import GrammarRows  # llguidance may not be installed.

        self._rows = GrammarRows(state.unused_row, tokens, _THREADS, self._known_tokens)
        self._num_words = -(-tokens.vocab_size // 32)

    def enter(self, plan: StepPlan, under_way: Iterable[DeviceFlight], staging: Staging) -> None:
        """Take in the plan's rows. Draws for requests that leave are taken before."""
        freed = [*plan.freed_rows, *(new.row for new in plan.new_rows)]
        if any(row in self._rows for row in freed):
            self.take(under_way, staging)
        for row in plan.freed_rows:
            self._rows.leave(row)
        for new in plan.new_rows:
            self._rows.enter(new)

    def any(self, host: HostStep) -> bool:
        """Whether a row that draws has a grammar."""
        return any(row in self._rows for row in host.sample_rows.tolist())

    def masks(self, flight: DeviceFlight, host: HostStep, under_way: Iterable[DeviceFlight]) -> Masks | None:
        """The tokens that the step may draw, behind everything that is under way; its rows are noted in
        `flight`.
        """
        self.take(under_way, flight.staging)
        rows, positions = host.sample_rows.astype(np.int64), host.sample_positions.astype(np.int64)
        flight.constrained = [i for i, row in enumerate(rows.tolist()) if row in self._rows]
        flight.positions = positions
        if not flight.constrained:
            return None
        masks = self._rows.masks(rows, positions)
        if masks is None:
            masks = Masks(np.zeros((0, self._num_words), np.int32), np.full(len(rows), -1, np.int32))
        return masks.with_only(self._rows.known(rows, positions))

    def take(self, flights: Iterable[DeviceFlight], staging: Staging | None = None) -> None:
        """Continue behind what these steps drew, oldest first, if that was not done. `staging` is that of a
        step which is being launched; without one the host waits for its copies.
        """
        for flight in flights:
            if flight.constrained:
                assert flight.mark is not None, "a step that is under way was launched"
                flight.mark.wait()
                self._take(flight, staging)

    def _take(self, flight: DeviceFlight, staging: Staging | None) -> None:
        places, flight.constrained = flight.constrained, []
        rows, positions = np.array(flight.rows, np.int64)[places], flight.positions[places]
        drawn = flight.drawn.token_ids.numpy()[places].astype(np.int64)
        drawn[~flight.drawn.healthy.numpy()[places]] = -1
        for i, follows in self._rows.take(rows, positions, drawn).items():
            flight.follows[places[i]] = follows
            if isinstance(follows, Forced) and follows.token_ids:
                self._write(int(rows[i]), int(positions[i]) + 1, follows.token_ids, staging)

    def _write(self, row: int, first: int, token_ids: tuple[int, ...], staging: Staging | None) -> None:
        known = self._state.token_ids[row, first : first + len(token_ids)]
        values = np.array(token_ids[: known.shape[0]], np.int32)
        known.copy_(as_tensor(values) if staging is None else staging.put(values))

    def _known_tokens(self, row: int, start: int, end: int) -> list[int]:
        with torch.inference_mode():
            return int_list(self._state.token_ids[row, start:end].cpu())
