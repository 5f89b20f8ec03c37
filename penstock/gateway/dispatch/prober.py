"""Sends the probes that `Anomalies` asks for, and carries out what it decides about workers.

A probe goes straight to its worker, past queues, limits and the ledger, in a prefix cache namespace of its
own: it is the tenant `platform`'s, whose time on the worker no request pays for. So it also reaches a worker
that is given nothing else.

    our engine      log-probabilities against those of its identity
    vLLM, SGLang    against the worker's own first answer, which a restart forgets: whether two of them
                    compute the same is not known
    others          how long it took: they promise neither text nor log-probabilities
    providers       the same, rarely, for each probe costs money
"""

import asyncio
import math
from collections.abc import Callable

import msgspec

from penstock.backends.base import Delta, Finish, GenerateRequest, Generation
from penstock.clock import NS_PER_S, Clock
from penstock.errors import EngineFault, PenstockError
from penstock.fleet.registry import Registry, Worker
from penstock.policy.resilience.anomalies import Anomalies, Standing, StandingChange
from penstock.policy.resilience.probes import PROMPT, TOKENS, TOP, ProbeAnswer, ProbeToken
from penstock.policy.resilience.worker_state import WorkerState
from penstock.telemetry.log import Log
from penstock.telemetry.worker_meters import AnomalyMeters
from penstock.text.tokenizer import Tokenizer
from penstock.types import PLATFORM, FinishReason, RequestId, SamplingParams, WorkerId

TIMEOUT_S = 20.0
"""A probe without an answer by then says nothing: the worker has other work, or is lost, which others see."""
PROVIDER_BEATS = 20
"""Beats between two probes of a provider: with the default ten minutes, for about thirty tokens."""
_JUDGED = SamplingParams(max_tokens=TOKENS, min_tokens=TOKENS, temperature=0.0, logprobs=TOP)
_TIMED = SamplingParams(max_tokens=TOKENS, temperature=0.0)
_CHAT = msgspec.json.encode({"messages": [{"role": "user", "content": PROMPT}], "max_tokens": TOKENS})
"""The question to a provider: no field that some of them refuse."""


def probed_as(worker: Worker) -> tuple[str, int]:
    """The worker whose answers a worker's are compared with (empty: none's), and the beats between its probes
    (0: it is not probed).
    """
    status = worker.backend.status
    if worker.cell is not None:
        return "", 0  # It probes its workers itself.
    if worker.engine == "penstock":
        identity = status.info.identity if status.info is not None else ""
        return identity, 1 if identity else 0
    if status.resumes:  # It tells token ids, and log-probabilities by id.
        return f"{worker.engine} {worker.id}", 1
    return "", PROVIDER_BEATS if worker.engine == "openai" else 1


class Prober:
    """One for a gateway process. `tick` it every second or so."""

    def __init__(
        self,
        anomalies: Anomalies,
        registry: Registry,
        tokenizer_of: Callable[[str], Tokenizer | None],
        *,
        name: str,
        meters: AnomalyMeters,
        clock: Clock,
        log: Log,
    ) -> None:
        """`name` tells this gateway's probes from others'."""
        self.anomalies = anomalies
        self._registry, self._tokenizer_of, self._name = registry, tokenizer_of, name
        self._meters, self._clock, self._log = meters, clock, log
        self._prompts: dict[str, tuple[int, ...]] = {}
        self._running: dict[WorkerId, _Probe] = {}
        self._faults: dict[WorkerId, dict[str, int]] = {}
        """As last seen."""
        self._num = 0
        registry.listen(self._look)

    def tick(self) -> None:
        """Send what is due, end what takes too long, and carry out what was decided."""
        now_ns = self._clock.now_ns()
        for probe in list(self._running.values()):
            if now_ns - probe.began_ns >= TIMEOUT_S * NS_PER_S:
                probe.abort()
        for worker_id in self.anomalies.due(now_ns):
            self._send(now_ns, worker_id)
        for change in self.anomalies.tick(now_ns):
            self._carry_out(change)
        self._meters.workers(
            (worker.route, worker.id, self.anomalies.slowness(worker.id), self.anomalies.weight(worker.id))
            for worker in self._registry
        )
        self._meters.certain(self.anomalies.certain())

    def close(self) -> None:
        """End what runs."""
        for probe in list(self._running.values()):
            probe.abort()

    def ended(self, worker_id: WorkerId, answer: ProbeAnswer | None, error: PenstockError | None) -> None:
        """For a probe: it is over, and this is what came of it."""
        self._running.pop(worker_id, None)
        if answer is not None:
            self._judged(worker_id, answer)
        elif isinstance(error, EngineFault):
            self._judged(worker_id, None, fault=str(error))
        else:
            self._judged(
                worker_id, None, why=f"no answer within {TIMEOUT_S:g} s" if error is None else str(error)
            )

    def _look(self, worker: Worker) -> None:
        """Count its faults as they come: a worker that ends with one is gone before anyone asks."""
        status = worker.backend.status
        if status.faults:
            seen = self._faults.setdefault(worker.id, {})
            for kind, fault in status.faults.items():
                for _ in range(fault.count - seen.get(kind, 0)):
                    self._meters.fault(worker.route, kind)
                    why = fault.words or kind
                    self._log.error("a fault of a worker's machine", worker=worker.id, kind=kind, why=why)
            self._faults[worker.id] = {kind: fault.count for kind, fault in status.faults.items()}
        if worker.state is WorkerState.GONE:
            self._faults.pop(worker.id, None)

    def _judged(
        self, worker_id: WorkerId, answer: ProbeAnswer | None, *, fault: str = "", why: str = ""
    ) -> None:
        verdict = self.anomalies.probed(self._clock.now_ns(), worker_id, answer, fault=fault, why=why)
        watched = self.anomalies.get(worker_id)
        if watched is not None:
            apart = watched.distance if math.isfinite(watched.distance) else 1e3
            self._meters.probed(watched.route, worker_id, verdict, answer, apart)

    def _send(self, now_ns: int, worker_id: WorkerId) -> None:
        worker = self._registry.get(worker_id)
        prompt = () if worker is None or _makes_vectors(worker) else self._prompt(worker.route)
        if worker is None or not prompt:
            self._judged(worker_id, None, why="there is nothing to ask it")
            return
        self._num += 1
        is_chat = worker.engine == "openai"
        request = GenerateRequest(
            request_id=RequestId(f"probe-{self._name}-{self._num}"),
            prompt_token_ids=prompt,
            sampling=_JUDGED if probed_as(worker)[0] else _TIMED,
            body=_CHAT if is_chat else b"",
            is_chat=is_chat,
            # Another namespace each time: what is cached would not be computed.
            cache_salt=f"{PLATFORM} {self._name} {self._num}".encode(),
            fairness_key=PLATFORM,
        )
        probe = _Probe(self, worker_id, now_ns, self._clock)
        try:
            probe.stream = worker.backend.generate(request, probe)
        except PenstockError as error:
            self._judged(worker_id, None, why=str(error))
        else:
            if not probe.is_over:
                self._running[worker_id] = probe

    def _prompt(self, route: str) -> tuple[int, ...]:
        found = self._prompts.get(route)
        if found is None:
            tokenizer = self._tokenizer_of(route)
            found = () if tokenizer is None else tokenizer.encode(PROMPT, add_special_tokens=True)
            self._prompts[route] = found
        return found

    def _carry_out(self, change: StandingChange) -> None:
        write = self._log.info if change.standing is Standing.WELL else self._log.warning
        write(
            "a worker's standing has changed",
            worker=change.worker,
            model=change.route,
            standing=change.standing.value,
            cause=change.cause,
            why=change.why,
        )
        if change.standing is Standing.EJECTED:
            self._meters.ejected(change.route, change.cause)
        if (worker := self._registry.get(change.worker)) is not None:
            self._registry.tell(worker)


class _Probe:
    """The sink of one probe."""

    def __init__(self, prober: Prober, worker_id: WorkerId, began_ns: int, clock: Clock) -> None:
        self.began_ns, self.is_over = began_ns, False
        self.stream: Generation | None = None
        self._prober, self._worker_id, self._clock = prober, worker_id, clock
        self._tokens: list[ProbeToken] = []
        self._num_tokens = self._first_ns = 0

    def abort(self) -> None:
        """Its time is up."""
        if self.stream is not None:
            self.stream.abort()

    def on_delta(self, delta: Delta) -> None:
        """See `Sink`."""
        self._first_ns = self._first_ns or self._clock.now_ns()
        self._num_tokens += len(delta.token_ids)
        for each in delta.logprobs:
            top = {data or text.encode(): logprob for text, data, logprob in each.top}
            self._tokens.append(ProbeToken(each.token_bytes or each.token.encode(), top))

    def on_finish(self, finish: Finish) -> None:
        """See `Sink`."""
        self.is_over, now_ns = True, self._clock.now_ns()
        answer = None
        if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
            num_more = max(1, self._num_tokens - 1)
            answer = ProbeAnswer(
                tokens=tuple(self._tokens),
                ttft_ns=(self._first_ns or now_ns) - self.began_ns,
                tpot_ns=(now_ns - (self._first_ns or now_ns)) // num_more,
            )
        # The decision may change which worker is probed next: not inside of the backend's own work.
        asyncio.get_running_loop().call_soon(self._prober.ended, self._worker_id, answer, finish.error)


def _makes_vectors(worker: Worker) -> bool:
    """A probe asks for an answer's tokens, which such a worker has none of."""
    info = worker.backend.status.info
    return info is not None and bool(info.pooling)
