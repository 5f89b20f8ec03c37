"""Carries out step plans on a device, without waiting for it: `launch` queues a step, `collect` fetches the
oldest.

    launch   plan ─ pack ─> host buffer ─ one copy ─> device: prepare, forward, draw ─ copies ─> host results
    collect  wait for the oldest mark, read its results

Rows live on the device: their tokens (drawn ones too, before the host has seen them), block tables and
sampling parameters. The host sends what it alone knows: which rows, how far, which new blocks. Nothing in
`launch` asks the device for an answer, but for steps that draw for a grammar (results.py). Everything runs in
one queue, so a step sees the rows as the step before left them.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.clock import NS_PER_MS, Clock
from penstock.engine.decoder import Decoder
from penstock.engine.gpu.graphs import GraphCache, GraphLimits, StepKind
from penstock.engine.gpu.layers import DeviceAttention
from penstock.engine.gpu.ops import Ops
from penstock.engine.gpu.platform import Platform
from penstock.engine.gpu.results import DeviceFlight, scored_targets
from penstock.engine.gpu.rows import HostRows, HostStep
from penstock.engine.gpu.step import DeviceStep, DeviceStepInputs, Drawn, RowState, StepBuffer, StepLimits
from penstock.engine.gpu.worklist import WorkList
from penstock.engine.kv_cache import HostStore, KVCache
from penstock.engine.memory import largest_step
from penstock.engine.weight_check import WeightCheck
from penstock.planning.roofline import CostFloor
from penstock.protocol.worker import ModelInfo
from penstock.schedule.plan import NewRow, RowWork, StepPlan, StepResult
from penstock.types import RequestId, SamplingParams

if TYPE_CHECKING:
    from penstock.engine.gpu.results import DeviceGrammars
    from penstock.engine.grammar.compiler import GrammarTokens

FLIGHTS = 3
"""Steps under way at most: more than the scheduler ever plans ahead."""
GRAPH_WARM_UP_NS = 2000 * NS_PER_MS
"""Start-up spends this long on capturing; the rest is captured when it is used."""


@dataclass(slots=True, frozen=True, kw_only=True)
class DeviceParts:
    """Everything a device runner is wired from."""

    info: ModelInfo
    platform: Platform
    ops: Ops
    decoder: Decoder
    weights: Callable[[], list[Tensor]]
    """The decoder's weights, as they lie in memory."""
    cache: KVCache
    attention: DeviceAttention
    host: HostStore
    limits: StepLimits
    graphs: GraphLimits
    clock: Clock
    floor: CostFloor


class DeviceRunner:
    """One model on one device. Not thread-safe. Results come in the order of launches."""

    @torch.inference_mode()
    def __init__(self, parts: DeviceParts) -> None:
        self.info, self.floor = parts.info, parts.floor
        self.kernels = f"{parts.platform.device.type} {parts.ops.name}"
        """The name of the kernels, for people."""
        self.pci_address = parts.platform.pci_address
        self.cache = parts.cache
        """Keys and values."""
        self._weights = parts.weights
        self._host = parts.host
        self._ops, self._decoder, self._attention = parts.ops, parts.decoder, parts.attention
        self._platform, self._limits, self._clock = parts.platform, parts.limits, parts.clock
        device = parts.platform.device
        self._state = RowState.allocate(parts.limits, device)
        self._buffer = StepBuffer(parts.limits, device)
        self._inputs = DeviceStepInputs.allocate(parts.limits, device)
        self._drawn = Drawn.allocate(parts.limits.max_running, device)
        self._rows = HostRows(self._state)
        self._grammars: DeviceGrammars | None = None
        self.graphs = GraphCache(parts.platform, parts.graphs, self._run)
        """The captured code; for statistics."""
        self._idle = deque(DeviceFlight.allocate(parts.platform, parts.limits) for _ in range(FLIGHTS))
        self._under_way: deque[DeviceFlight] = deque()

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> None:
        """Queue a plan's step. At most `FLIGHTS` may be under way. Returns before it is computed.

        A plan without work only lets rows enter, and its `collect` waits for a copy.
        """
        assert self._idle, "too many steps are under way: collect one first"
        flight = self._idle.popleft()
        flight.step, flight.computes = plan.step, bool(plan.work)
        flight.staging.clear()
        flight.clear()
        try:
            self._start(plan, flight)
        except BaseException:
            self._idle.append(flight)  # Out of memory, say: the scheduler tries a smaller step.
            raise
        flight.mark = self._platform.mark()
        self._under_way.append(flight)

    def _start(self, plan: StepPlan, flight: DeviceFlight) -> None:
        if self._grammars is not None:
            self._grammars.enter(plan, self._under_way, flight.staging)
        self._host.start(plan)
        self._rows.apply(plan, flight.staging)
        if flight.computes:
            self._launch_work(flight, HostStep.of(plan))

    @torch.inference_mode()
    def collect(self) -> StepResult:
        """Wait for the oldest step that was launched, and give its results."""
        flight = self._under_way.popleft()
        assert flight.mark is not None
        flight.mark.wait()
        if self._grammars is not None:
            self._grammars.take((flight,))
        sampled, scored = flight.results()
        self._idle.append(flight)
        copied = self._host.collect(wait=not flight.computes)
        return StepResult(flight.step, sampled, scored, copied)

    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's step and draw the tokens that it asks for; nothing else may be under way."""
        assert not self._under_way, "collect the steps under way first"
        self.launch(plan)
        return self.collect()

    def weight_tensors(self) -> list[Tensor]:
        """The weights as they lie in memory."""
        return self._weights()

    def use_grammars(self, tokens: "GrammarTokens") -> None:
        """Follow the grammars of requests, which are made for this vocabulary."""
        from penstock.engine.gpu.results import DeviceGrammars  # llguidance may not be installed.

        self._grammars = DeviceGrammars(tokens, self._state)

    def weight_check(self, clock: Clock) -> WeightCheck:
        """The background check of its weights in idle time."""
        return WeightCheck(self._weights(), clock)

    def idle(self) -> bool:
        """Use idle time for capturing one graph that was missed. False: there is nothing to do."""
        with torch.inference_mode():
            return not self._under_way and self.graphs.capture_next()

    def warm_up(self) -> None:
        """Run the step that takes the most memory, then capture the graphs of decoding as far as time allows.

        Must be called while no row is live: it uses all rows and the first blocks.
        """
        self.run(largest_step(self._limits, self.info.num_blocks))
        new = NewRow(RequestId("warm-up"), 0, (0,), 1, SamplingParams(temperature=1.0, top_p=0.9))
        self.run(StepPlan(0, (new,), (RowWork(0, 0, 1, samples=True, new_blocks=(0,)),)))
        started_ns = self._clock.now_ns()
        with torch.inference_mode():
            for step in self.graphs.decode_steps():
                if self._clock.now_ns() - started_ns > GRAPH_WARM_UP_NS:
                    break
                self.graphs.warm(step)
        self._platform.mark().wait()

    # --- one step ---------------------------------------------------------------------------------

    def _upload(self, buffer: StepBuffer, host: HostStep) -> None:
        """Describe the step and send as much of the description as is used."""
        work = WorkList.of(host.rows, host.computed, host.num_tokens, self._limits.work)
        buffer.fill(host.rows, host.computed, host.num_tokens, host.sampled, work)
        used = buffer.items.storage_offset() + work.items.size
        self._buffer.flat[:used].copy_(buffer.flat[:used], non_blocking=True)
        if merges := len(work.combines):
            self._buffer.combines[:merges].copy_(buffer.combines[:merges], non_blocking=True)

    def _launch_work(self, flight: DeviceFlight, host: HostStep) -> None:
        self._upload(flight.buffer, host)
        self._ops.plan(host.rows, host.computed, host.num_tokens, self._state)
        if host.scoring:
            self._launch_scoring(flight, host)
        else:
            self._launch_plain(flight, host)

    def _launch_plain(self, flight: DeviceFlight, host: HostStep) -> None:
        """A step that only draws, from its graph if there is one; logits that are to be changed are drawn
        from apart.
        """
        count = len(host.sampled)
        adjusts = self._adjusts(host)
        kind = StepKind(host.total_tokens, count, host.decode_only, draws=count > 0 and not adjusts)
        bucket = self.graphs.launch(kind)
        logits = self._decoder.logits[: bucket.samples]
        if adjusts:
            self._draw_adjusted(flight, host, logits, self._step(bucket))
        flight.read_drawn(self._drawn, host)
        flight.read_logprobs(logits, self._drawn, self._rows.logprobs)
        flight.scored_rows = []

    def _launch_scoring(self, flight: DeviceFlight, host: HostStep) -> None:
        """A step that computes the logits of prompt tokens too: never from a graph."""
        count = len(host.sampled)
        step = self._step(StepKind(host.total_tokens, count, host.decode_only, draws=False))
        tokens, targets, scored = scored_targets(host, self._rows, self._state, flight.staging)
        logits = self._forward(step, tokens)
        if count:
            self._draw_adjusted(flight, host, logits[:count], step)
        flight.read_drawn(self._drawn, host)
        flight.read_logprobs(logits, self._drawn, self._rows.logprobs)
        flight.read_scores(logits[count:], targets, scored, self._rows)

    def _draw_adjusted(self, flight: DeviceFlight, host: HostStep, logits: Tensor, step: DeviceStep) -> None:
        """Draw from logits that rows may have changed, and leave them as the model gave them."""
        rows, positions = host.sample_rows, host.sample_positions
        drawn = self._drawn.head(logits.shape[0])
        if not self._adjusts(host):
            self._ops.sample(logits, step, drawn)
            return
        grammars = self._grammars
        masks = None if grammars is None else grammars.masks(flight, host, self._under_way)
        adjusted = self._rows.adjustments.change(logits, rows, positions, self._state, flight.staging, masks)
        self._ops.sample(logits, step, drawn)
        adjusted.undo()

    def _adjusts(self, host: HostStep) -> bool:
        """Whether a row's logits are changed before it draws."""
        return self._rows.adjustments.any(host.sample_rows) or (
            self._grammars is not None and self._grammars.any(host)
        )

    def _run(self, kind: StepKind) -> None:
        """The code that graphs capture: from the step's description in device memory to its drawn tokens."""
        step = self._step(kind)
        logits = self._forward(step, None)
        if kind.draws:
            self._ops.sample(logits, step, self._drawn.head(kind.samples))

    def _forward(self, step: DeviceStep, more_logits: Tensor | None) -> Tensor:
        """Logits of the tokens that are drawn from, and of `more_logits` (indices) after them."""
        self._ops.prepare(step, self._attention.slots_per_block)
        self._attention.use(step)
        tokens = step.inputs.sample_tokens
        wanted = tokens if more_logits is None else torch.cat((tokens, more_logits))
        return self._decoder.forward(step.inputs.token_ids, wanted, self._attention)

    def _step(self, kind: StepKind) -> DeviceStep:
        inputs = self._inputs.head(kind.tokens, kind.samples)
        return DeviceStep(self._buffer, self._state, inputs, kind.decode_only)
