"""The engine without its sockets: requests in, one step at a time, outputs by owner.

    submit / abort ──> Scheduler ──plan──> Runner ──result──> Scheduler ──outcome──> outputs
                          ^ decides          ^ computes

An *owner* is a number that says who asked (a connection). Trouble with one request is that request's finish;
anything that this code does not expect is raised, and the process ends.
"""

import logging
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from msgspec.structs import replace

from penstock.clock import NS_PER_S, Clock
from penstock.config.engine_settings import EngineSettings
from penstock.engine.adapters.manager import AdapterManager, AdapterRead, Reads, Released
from penstock.engine.mailbox import (
    STATS_INTERVAL_NS,
    Aborted,
    DrainAsked,
    Ordered,
    Submitted,
    failed_by,
    request_of,
)
from penstock.engine.steps import Prepares, StepMeters, wire_steps
from penstock.errors import Draining, InvalidRequest, PenstockError, WorkerUnavailable
from penstock.kv.cache.host_tier import HostLimits
from penstock.kv.cache.manager import KVManager
from penstock.kv.hashing import BlockHasher
from penstock.planning.roofline import CostFloor
from penstock.protocol.worker import ModelInfo, Output, RequestFinished, Stats, Submit
from penstock.protocol.worker_parts import KeepAdapters, LoadAdapter, UnloadAdapter
from penstock.schedule.adapters import PooledAdapter
from penstock.schedule.batch import BatchLimits
from penstock.schedule.plan import RequestOutput, StepPlan, StepResult
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.queue import waiting_queue
from penstock.schedule.request import Request
from penstock.schedule.scheduler import Scheduler
from penstock.types import PLATFORM, FinishReason, RequestId, Usage

_log = logging.getLogger(__name__)

Outputs = dict[int, list[Output]]
"""The outputs for each owner."""

HOST_LOADS_MAX = 256
"""KV blocks on their way back from host memory at once; more wait."""
HOST_STORES_MAX = 32
"""KV blocks on their way to host memory at once: few, since nothing waits for them and they take
bandwidth."""


class StepRunner(Protocol):
    """The interface of the code that computes. It holds weights, KV tensors and one table row per running
    request.
    """

    @property
    def info(self) -> ModelInfo:
        """The loaded model, and how much of it fits."""
        ...

    def warm_up(self) -> None:
        """Run a first step, so that no request pays for lazy set-up."""
        ...

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step.

        A runner that also has `launch` and `collect` (see `Steps`) is driven by those.
        """
        ...


class Check(Protocol):
    """Something to look after in idle time, in small parts: `weight_check.WeightCheck`."""

    due_ns: int | None
    """When there is something to do; None: never."""

    def step(self) -> None:
        """Do one part, if it is time."""
        ...


@runtime_checkable
class OnDevice(Protocol):
    """A runner that computes on a device with faults of its own."""

    pci_address: str | None
    """As in the kernel's log; empty if that is not known, None for a processor."""


@runtime_checkable
class HoldsWeights(Protocol):
    """A runner whose weights can be read in idle time."""

    def weight_check(self, clock: Clock) -> Check:
        """The reader of the weights."""
        ...


@runtime_checkable
class TakesAdapters(Protocol):
    """A runner whose rows may have adapters."""

    adapters: Reads | None
    """The reader of adapters; None: it was configured to take none."""


@runtime_checkable
class KnowsFloor(Protocol):
    """A runner that knows the least time that its device needs."""

    floor: CostFloor


@runtime_checkable
class FollowsGrammars(Protocol):
    """A runner whose answers can be held to a grammar."""

    def use_grammars(self, tokens: Any) -> None:  # noqa: ANN401
        """Requests may bring grammars from now on, made for these tokens (`engine/grammar`)."""
        ...


@dataclass(slots=True)
class Live:
    """A request that has not ended, and whose it is."""

    owner: int
    request: Request
    has_output: bool = False
    """Whether its owner had any output yet."""
    adapter: PooledAdapter | None = None


class EngineCore:
    """One engine: call `step` for as long as `has_work`, and after `sleep_s` without."""

    def __init__(
        self, scheduler: Scheduler, runner: StepRunner, clock: Clock, config: EngineSettings
    ) -> None:
        self._scheduler, self._runner, self._clock = scheduler, runner, clock
        self._steps, self._depth = wire_steps(runner, runner.run, config.overlap)
        self._prepares = runner if isinstance(runner, Prepares) else None
        self._check = runner.weight_check(clock) if isinstance(runner, HoldsWeights) else None
        floor = runner.floor if isinstance(runner, KnowsFloor) else None
        self._meters = StepMeters(floor, runner.info.block_tokens)
        self._in_flight = 0
        self.adapters: AdapterManager | None = None
        """Set by `use_adapters`."""
        self._live: dict[RequestId, Live] = {}
        self._outbox: Outputs = {}
        self._draining = False
        self._step_ns = self._waited_ns = self._busy_ns = self._num_ended = 0
        self._busy_since_ns = 0
        """While there is a request: up to when that time was counted."""
        self._stats_due_ns = 0

    @property
    def info(self) -> ModelInfo:
        """The runner's model."""
        return self._runner.info

    @property
    def device(self) -> str | None:
        """The PCI address of the GPU that computes, empty if that is not known; None without one."""
        return self._runner.pci_address if isinstance(self._runner, OnDevice) else None

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended, its end was not told yet, or a step is on its way."""
        return bool(self._live or self._outbox or self._in_flight)

    @property
    def num_held(self) -> int:
        """Requests that wait for an adapter, about which there will be mail."""
        return self.adapters.num_waiting if self.adapters is not None else 0

    @property
    def sleep_s(self) -> float | None:
        """How long there is nothing to do if nothing comes in; then `step` moves what is idle.

        None for ever.
        """
        due_ns = self._scheduler.due_ns
        return None if due_ns is None else max(0, due_ns - self._clock.now_ns()) / NS_PER_S

    @property
    def gathers_s(self) -> float:
        """How long more requests are waited for before the next step; 0: not at all."""
        return 0.0

    @property
    def rest_s(self) -> float | None:
        """How long the caller may sleep if nothing comes in: `sleep_s`, or until weights are to be read."""
        sleep_s, due_ns = self.sleep_s, None if self._check is None else self._check.due_ns
        if due_ns is None:
            return sleep_s
        check_s = max(0, due_ns - self._clock.now_ns()) / NS_PER_S
        return check_s if sleep_s is None else min(sleep_s, check_s)

    def use_idle_time(self) -> bool:
        """Let the runner prepare one thing that will be wanted, while nothing runs, or else look after its
        weights.

        False: there is nothing to prepare.

        Raises:
            WeightsDamaged: they have changed.
        """
        if self._prepares is not None and self._prepares.idle():
            return True
        if self._check is not None:
            self._check.step()
        return False

    @property
    def kv(self) -> KVManager:
        """The KV blocks, for the publisher of their events."""
        return self._scheduler.kv

    def take_mail(self, mail: Submitted | Aborted | DrainAsked | Ordered | AdapterRead) -> None:
        """Do what a message to the step loop says."""
        if isinstance(mail, Submitted):
            self.submit(mail.connection, mail.submit, mail.arrived_ns, mail.grammar)
        elif isinstance(mail, Ordered):
            if isinstance(mail.order, LoadAdapter | UnloadAdapter | KeepAdapters):
                self.order_adapter(mail.order)
        elif isinstance(mail, AdapterRead):
            self.take_adapter(mail)
        elif isinstance(mail, Aborted):
            self.abort(mail.connection, mail.request_ids)
        else:
            self.drain()

    def submit(self, owner: int, message: Submit, arrived_ns: int, grammar: object = None) -> None:
        """Queue a request; one that cannot be taken ends in the next `step` with the reason.

        `grammar`: what the message's own was compiled to.
        """
        try:
            if self._draining:
                raise Draining("this worker is going away")
            if message.adapter:
                self._go_on(self._adapter_manager().submit(owner, message, arrived_ns, grammar))
                return
            self._submit(owner, message, arrived_ns, grammar)
        except PenstockError as error:
            self._end_with(owner, message.request_id, error)

    @property
    def adapter_reader(self) -> Reads | None:
        """The reader of adapters for the runner; None: it takes none."""
        return self._runner.adapters if isinstance(self._runner, TakesAdapters) else None

    def use_adapters(self, manager: AdapterManager) -> None:
        """Take requests that name adapters."""
        self.adapters = manager

    def order_adapter(self, order: LoadAdapter | UnloadAdapter | KeepAdapters) -> None:
        """A gateway wants an adapter to come, to go or to stay."""
        if self.adapters is None:
            _log.warning("an order about adapters: this worker takes none")
        else:
            self._go_on(self.adapters.take_order(order))

    def take_adapter(self, update: AdapterRead) -> None:
        """An adapter was read, or could not be."""
        self._go_on(self._adapter_manager().take(update))

    def _adapter_manager(self) -> AdapterManager:
        if self.adapters is None:
            raise WorkerUnavailable("this worker takes no adapters (engine.adapter_slots)")
        return self.adapters

    def _go_on(self, released: Released) -> None:
        """Requests whose adapter has come, and those that it never will."""
        for waiting, why in released.failed:  # The reason may name a file: it is for the log alone.
            _log.info("the adapter '%s' cannot be had: %s", waiting.entry.name, why)
            error = WorkerUnavailable(f"the adapter '{waiting.entry.name}' cannot be had")
            self._end_with(waiting.request.owner, waiting.request.message.request_id, error)
        for each in released.ready:
            owner, message = each.request.owner, each.request.message
            try:
                self._submit(owner, message, each.arrived_ns, each.request.grammar, each.entry)
            except PenstockError as error:
                self._end_with(owner, message.request_id, error)
                self._go_on(self._adapter_manager().finished(each.entry))

    def _submit(
        self,
        owner: int,
        message: Submit,
        arrived_ns: int,
        grammar: object,
        adapter: PooledAdapter | None = None,
    ) -> None:
        if grammar is None and message.grammar is not None and not message.grammar.is_optional:
            raise InvalidRequest("this worker has no grammars", param="grammar")
        request = request_of(message, self._runner.info.vocab_size, grammar)
        if adapter is not None:
            request.adapter = adapter.packed
            request.adapter_name, request.adapter_digest = adapter.name, adapter.digest
        # Waiting for the step that ran meanwhile is queueing too.
        self._scheduler.submit(request, arrived_ns=arrived_ns)
        if not self._live:
            self._busy_since_ns = self._clock.now_ns()
        self._live[message.request_id] = Live(owner, request, adapter=adapter)

    def abort(self, owner: int, request_ids: tuple[RequestId, ...]) -> None:
        """End these requests of this owner and free what they hold; unknown ones have just ended."""
        for request_id in request_ids:
            live = self._live.get(request_id)
            if live is None or live.owner != owner:
                if live is None and self.adapters is not None and self.adapters.abort(owner, request_id):
                    self._end_early(owner, request_id)
                continue
            if (last := self._scheduler.abort(request_id)) is not None:
                self._tell(last)

    def drain(self) -> None:
        """Take nothing new from now on."""
        self._draining = True

    def step(self) -> Outputs:
        """Finish one step, and hand over everything there is to tell since the last one.

        With overlap the next step is launched before this one is waited for, so that it computes while the
        caller tells what came of this one.
        """
        started_ns = self._clock.now_ns()
        while self._in_flight < self._depth and (plan := self._scheduler.schedule()) is not None:
            self._steps.launch(plan)
            self._in_flight += 1
        if self._in_flight:
            waiting_ns = self._clock.now_ns()
            result = self._steps.collect()
            now_ns = self._clock.now_ns()
            self._waited_ns += now_ns - waiting_ns
            self._in_flight -= 1
            self._scheduler.count_drafts(result)
            self._meter(now_ns)
            if result.out_of_memory is not None:
                _log.warning("a step ran out of memory and is done again in parts: %s", result.out_of_memory)
            for output in self._scheduler.apply(result).outputs:
                self._tell(output)
        outputs, self._outbox = self._outbox, {}
        self._step_ns += self._clock.now_ns() - started_ns
        return outputs

    @property
    def num_steps(self) -> int:
        """Steps that were planned since the start."""
        return self._scheduler.num_steps

    def due_stats(self) -> Stats | None:
        """`stats`, if the last ones are old or there is nothing left to do; else None: nobody would see
        them.
        """
        if self.has_work and self._clock.now_ns() < self._stats_due_ns:
            return None
        return self.stats()

    def stats(self) -> Stats:
        """Gauges and counters, as gateways see them."""
        now, meters, now_ns = self._scheduler.statistics(), self._meters, self._clock.now_ns()
        self._stats_due_ns = now_ns + STATS_INTERVAL_NS
        meters.count()
        return Stats(
            step=now.step,
            running=now.running,
            waiting=now.waiting,
            blocks_total=now.blocks_total,
            blocks_used=now.blocks_used,
            blocks_cached=now.blocks_cached,
            prompt_tokens=now.prompt_tokens,
            cached_tokens=now.cached_tokens,
            host_cached_tokens=now.host_cached_tokens,
            host_blocks_total=now.host.total,
            host_blocks_used=now.host.used,
            host_stores=now.host.stores,
            host_loads=now.host.loads,
            generated_tokens=now.generated_tokens,
            drafted_tokens=now.drafted_tokens,
            accepted_tokens=now.accepted_tokens,
            preemptions=now.preemptions,
            ended=self._num_ended,
            rows_max=now.rows_max,
            step_ns=self._step_ns,
            host_ns=self._step_ns - self._waited_ns,
            busy_ns=self._busy_ns + (now_ns - self._busy_since_ns if self._live else 0),
            memory_ns=meters.memory_ns,
            floor_ns=meters.floor_ns,
            timed_steps=now.sums.steps,
            timed_tokens=now.sums.tokens,
            timed_sequences=now.sums.sequences,
            timed_kv_read=now.sums.kv_read,
            timed_pairs=now.sums.pairs,
            timed_ns=now.sums.ns,
            kv_held_tokens=meters.kv_held_tokens,
        )

    def _meter(self, now_ns: int) -> None:
        """The oldest step is over."""
        spent_ns = None  # They left while it ran: that time is charged to no request.
        if self._live:
            spent_ns, self._busy_since_ns = now_ns - self._busy_since_ns, now_ns
            self._busy_ns += spent_ns
        self._meters.step_over(self._scheduler.oldest, spent_ns, self._scheduler.kv.pool.num_used)

    def _tell(self, output: RequestOutput) -> None:
        """Put one request's news into the outbox, with the usage when it is the first or the last."""
        live = self._live[output.request_id]
        finish, usage = None, None
        if output.finish is not None:
            self._meters.count()
            finish = _finish(output, live.request.device_ns)
            del self._live[output.request_id]
            self._num_ended += live.request.fairness_key != PLATFORM
            if not self._live:
                self._busy_ns += self._clock.now_ns() - self._busy_since_ns
            if live.adapter is not None:
                self._go_on(self._adapter_manager().finished(live.adapter))
        elif output.token_ids and not live.has_output:
            live.has_output = True
            usage = live.request.usage(self._clock.now_ns())
        logprobs = None if output.logprob is None else (output.logprob,)
        scores, vectors = output.prompt_logprobs, ((0, output.vector),) if output.vector else ()
        device_ns = live.request.device_ns
        reported = Output(
            output.request_id,
            output.token_ids,
            logprobs,
            finish,
            usage,
            scores,
            device_ns,
            vectors,
            live.request.drafts,
        )
        self._outbox.setdefault(live.owner, []).append(reported)

    def _end_early(self, owner: int, request_id: RequestId) -> None:
        """A request was aborted before it reached the scheduler."""
        finish = RequestFinished(reason=FinishReason.ABORT, usage=Usage())
        self._outbox.setdefault(owner, []).append(Output(request_id, (), None, finish))

    def _end_with(self, owner: int, request_id: RequestId, error: PenstockError) -> None:
        self._outbox.setdefault(owner, []).append(Output(request_id, (), None, failed_by(error)))


def build_core(
    runner: StepRunner,
    config: EngineSettings,
    hash_key: bytes,
    clock: Clock,
    kind: type["EngineCore"] = EngineCore,
) -> EngineCore:
    """The engine around a loaded runner: its scheduler, its KV blocks and their secret names."""
    info = runner.info
    if config.prefix_cache:
        hasher = BlockHasher(key=hash_key, identity=info.identity)
        manager = KVManager.with_prefix_cache(info.num_blocks, hasher, _host_limits(info, config))
    else:
        manager = KVManager.without_prefix_cache(info.num_blocks)
    limits, prefill = BatchLimits.of(config, info.max_model_len), PrefillBudget(LatencyTargets.of(config))
    worth = config.draft_worth if info.speculation else None
    scheduler = Scheduler(limits, manager, clock, waiting_queue(config), prefill, draft_worth=worth)
    return kind(scheduler, runner, clock, config)


def _host_limits(info: ModelInfo, config: EngineSettings) -> HostLimits:
    return HostLimits(
        num_slots=info.num_host_blocks,
        idle_ns=round(config.host_kv_idle_s * NS_PER_S),
        loads_max=HOST_LOADS_MAX,
        stores_max=HOST_STORES_MAX,
    )


def _finish(output: RequestOutput, device_ns: int) -> RequestFinished:
    assert output.finish is not None
    assert output.usage is not None
    return RequestFinished(
        reason=output.finish,
        usage=replace(output.usage, device_ns=device_ns),
        stop_token_id=output.stop_token_id,
        error=output.error,
        error_kind=None if output.error is None else "EngineFault",
    )
