"""Steps of a decoder whose hidden states are wanted: tables, forward pass, pooling.

A prompt may be computed in several chunks. The mean is a sum in float64, token by token in the order of the
text, so that it has the same bits however the text was cut.
"""

import numpy as np
import numpy.typing as npt
import torch

from penstock.clock import Clock
from penstock.engine.arrays import as_tensor
from penstock.engine.attention.base import AttentionBatch
from penstock.engine.inputs import RowTables, StepInputs
from penstock.engine.memory import blocks_of, largest_step
from penstock.engine.runner import RunnerParts
from penstock.engine.weight_check import WeightCheck
from penstock.models.pooling import PoolingSpec
from penstock.protocol.worker import ModelInfo
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import RowWork, Sampled, StepPlan, StepResult

FloatArray = npt.NDArray[np.float64]
_NORM_MIN = 1e-12
"""Of a vector that is scaled to length 1."""


def vector_of(values: npt.NDArray[np.floating], *, normalise: bool) -> tuple[bytes, str | None]:
    """A vector as it is sent, and what is wrong with it, if anything is."""
    found = np.asarray(values, np.float64)
    if not np.isfinite(found).all():
        return b"", "the model's hidden states are not finite numbers"
    if normalise:
        found = found / max(float(np.sqrt(np.square(found).sum())), _NORM_MIN)
    return found.astype("<f4").tobytes(), None


class PoolingRunner:
    """One decoder on the CPU. Not thread-safe: one step at a time."""

    def __init__(self, parts: RunnerParts, info: ModelInfo, pooling: PoolingSpec) -> None:
        """`info`: the reported facts, in the place of the decoder's own."""
        self.info, self.floor = info, parts.floor
        self._model, self._cache, self._host = parts.model, parts.cache, parts.host
        self._step_tokens = parts.step_tokens
        self._tables = RowTables(max_running=parts.info.max_running, max_model_len=parts.info.max_model_len)
        self._pooling = pooling
        self._sums: dict[int, FloatArray] = {}
        """By row, of the tokens that were computed."""

    @property
    def kernels(self) -> str:
        """The name of the kernels, for people."""
        return self._model.kernels

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> StepResult:
        """Compute a plan's step; what samples in it gets its vector."""
        self._host.start(plan)
        for row in (*plan.freed_rows, *(new.row for new in plan.new_rows)):
            self._sums.pop(row, None)
        if not plan.work:
            self._tables.enter(plan)
            return StepResult(plan.step, (), copied=self._host.collect(wait=True))
        inputs = self._tables.apply(plan)
        self._cache.clear(inputs.fresh_blocks)
        takes_all = self._pooling.kind == "mean"
        hidden = self._hidden(inputs, every_token=takes_all)
        if takes_all:
            sampled = self._means(plan.work, hidden)
        else:
            rows = [work.row for work in plan.work if work.samples]
            sampled = tuple(self._sampled(row, each) for row, each in zip(rows, hidden, strict=True))
        return StepResult(plan.step, sampled, (), self._host.collect(wait=False))

    def weight_check(self, clock: Clock) -> WeightCheck:
        """The background check of its weights in idle time."""
        return WeightCheck(self._model.weights(), clock)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Run the largest step that can come; see `Runner.warm_up`."""
        bounds = BatchLimits(self._step_tokens, self.info.max_running, self.info.max_model_len)
        plan = largest_step(bounds, self.info.num_blocks)
        with self._model.rehearsing():
            self.run(plan)
        self._sums.clear()
        self._cache.clear(list(range(blocks_of(plan))))

    def _hidden(self, inputs: StepInputs, *, every_token: bool) -> npt.NDArray[np.float32]:
        """Hidden states of all tokens, or of those at which a text ends."""
        wanted = np.arange(len(inputs.token_ids)) if every_token else inputs.logit_tokens
        batch: AttentionBatch = inputs.batch
        hidden = self._model.compute(as_tensor(inputs.token_ids), as_tensor(wanted), batch)
        return hidden.numpy()

    def _means(self, works: tuple[RowWork, ...], hidden: npt.NDArray[np.float32]) -> tuple[Sampled, ...]:
        sampled: list[Sampled] = []
        start = 0
        for work in works:
            chunk = hidden[start : start + work.num_tokens].astype(np.float64)
            start += work.num_tokens
            if work.num_computed:
                chunk[0] += self._sums[work.row]
            # Along the first axis numpy adds row to row, in order.
            total: FloatArray = np.add.reduce(chunk, axis=0)
            if work.samples:
                self._sums.pop(work.row, None)
                sampled.append(self._sampled(work.row, total / (work.num_computed + work.num_tokens)))
            else:
                self._sums[work.row] = total
        return tuple(sampled)

    def _sampled(self, row: int, values: npt.NDArray[np.floating]) -> Sampled:
        vector, error = vector_of(values, normalise=self._pooling.normalise)
        return Sampled(row, 0, error=error, vector=vector)
