"""Requests of peer cells, guests: what becomes of one here.

A guest is a request like any other to queue, placement, health and ledger. Its limits and its
price were settled where it came from (`RequestFacts.origin`), and it stays in this cell: it needs a worker in
this place (`types.PLACE`).
"""

from collections.abc import Callable, Collection

from penstock.backends.base import Delta, Finish, GenerateRequest, TextLogprob
from penstock.errors import ClientError, InvalidRequest, Overloaded, PenstockError, WorkerUnavailable
from penstock.gateway.http.exchange import Exchange, RequestHead, Served, outcome_of
from penstock.gateway.http.terms import RelayTerms
from penstock.gateway.relay.reply import Context, Reply
from penstock.kv.hashing import PromptKeys, token_array
from penstock.policy.flow import RequestFacts
from penstock.policy.tenant import Tenant
from penstock.protocol.cells import HOPS_MAX
from penstock.protocol.needs import NO_CONSTRAINT, Constraint
from penstock.protocol.worker import Output, RequestFinished, Submit
from penstock.protocol.worker_parts import inputs_problem, sampling_problem, weight_of
from penstock.telemetry.catalog import Endpoint
from penstock.types import Capability, FinishReason, RequestId, TenantId, TokenLogprob, Usage

_TOKEN_BYTES = 8
"""Memory of one prompt token of a waiting request."""
_ENDPOINTS = frozenset(Endpoint)


class Arrival:
    """A guest, read and checked.

    `tokens` are those of its prompt.
    """

    __slots__ = ("guest", "submit", "tokens")

    def __init__(self, submit: Submit, vocab_size: int) -> None:
        """Raises:
        InvalidRequest: it is not what a gateway sends.
        WorkerUnavailable: it has been sent on already.
        """
        if submit.guest is None:
            raise InvalidRequest("it does not say whose it is")
        if submit.guest.hops > HOPS_MAX:
            raise WorkerUnavailable(f"it has left {submit.guest.hops} cells already, and goes no further")
        try:
            self.tokens = tuple(token_array(submit.prompt))
            resumed = tuple(token_array(submit.resumed))
        except (ValueError, OverflowError) as error:
            raise InvalidRequest(f"its tokens cannot be read: {error}", param="prompt") from error
        every = self.tokens + resumed
        if not self.tokens or min(every) < 0 or max(every) >= vocab_size:
            raise InvalidRequest("it has no tokens, or some that the model has not", param="prompt")
        problem = sampling_problem(submit.sampling, vocab_size)
        if problem is None and submit.inputs:
            problem = inputs_problem(len(self.tokens), submit.inputs, submit.firsts)
        if problem is not None:
            raise InvalidRequest(problem[1], param=problem[0])
        self.submit, self.guest = submit, submit.guest

    def facts(
        self, cell: str, route: str, bands: Collection[str], places: frozenset[str], keys: PromptKeys | None
    ) -> RequestFacts:
        """The guest of a cell as flow control sees it. `bands` are those that there are here, `places` where
        it must be computed.
        """
        submit, guest, num_tokens = self.submit, self.guest, len(self.tokens)
        band = guest.band if guest.band in bands else next(iter(bands))
        needs = places.union(guest.needs)
        if not submit.inputs:
            needs |= {Capability.TOKEN_IDS}
        return RequestFacts(
            id=submit.request_id,
            tenant=Tenant(
                id=TenantId(guest.tenant),
                tier=guest.tier,
                band=band,
                weight=weight_of(submit.fairness_weight),
                degrade="never",
                cache_salt=submit.cache_salt,
                fairness_key=submit.fairness_key,
            ),
            route=route,
            requested_model=route,
            prompt_tokens=num_tokens,
            prompts=(self.tokens,),
            context_tokens=max(guest.context_tokens, num_tokens),
            max_tokens=submit.sampling.max_tokens,
            num_bytes=_TOKEN_BYTES * num_tokens,
            max_wait_ns=max(0, guest.max_wait_ns),
            first_token_ns=max(0, guest.first_token_ns),
            degrade="never",
            needs=needs,
            endpoint=guest.endpoint,
            adapter=submit.adapter,
            session=guest.session,
            keys=keys,
            user=guest.user,
            origin=cell,
            origin_id=guest.request_id,
        )

    def request(self) -> GenerateRequest:
        """The request to a worker here. Text is made where its client is: stop strings are seen there."""
        submit = self.submit
        constraint = NO_CONSTRAINT if submit.grammar is None else Constraint(grammar=submit.grammar)
        return GenerateRequest(
            request_id=submit.request_id,
            prompt_token_ids=self.tokens,
            sampling=submit.sampling,
            resumed=tuple(token_array(submit.resumed)),
            adapter=submit.adapter,
            adapter_digest=submit.adapter_digest,
            cache_salt=submit.cache_salt,
            public_tokens=submit.public_tokens,
            fairness_key=submit.fairness_key,
            fairness_weight=submit.fairness_weight,
            constraint=constraint,
            inputs=submit.inputs,
            firsts=submit.firsts,
            trace_headers=self.guest.trace,
        )

    def served(self, route: str, tenant: Tenant) -> Served:
        """As it is counted."""
        endpoint = Endpoint(self.guest.endpoint) if self.guest.endpoint in _ENDPOINTS else Endpoint.CHAT
        return Served(model=route, requested=route, counted_model=route, endpoint=endpoint, tenant=tenant)


class _NoWire:
    """Guests' answers go over their cell's connection, and no HTTP is spoken."""

    paused = False

    def write(self, data: bytes) -> None:
        """Nothing."""

    def buffered_bytes(self) -> int:
        """Nothing waits."""
        return 0

    def response_done(self, *, keep_alive: bool) -> None:
        """Nothing follows."""

    def cut(self) -> None:
        """There is nothing to cut."""


def exchange_of(
    cell: str, name: str, terms: RelayTerms, started_ns: int, on_finished: Callable[[Exchange], None]
) -> Exchange:
    """The stand-in for a client's request and its response: the guest of a cell, by its name."""
    head = RequestHead(method="CELL", path=f"/cells/{cell}", headers={})
    exchange = Exchange(head, _NoWire(), client=cell, terms=terms, on_finished=on_finished)
    exchange.id, exchange.status, exchange.started_ns = name, 200, started_ns
    return exchange


class GuestReply(Reply):
    """One answer, token by token; it is its stream's sink."""

    __slots__ = ("_finish", "_is_reported", "_name", "_send")

    def __init__(self, context: Context, name: RequestId, send: Callable[[Output], None]) -> None:
        """`send` takes what is for the cell that the guest came from."""
        super().__init__(context)
        self._name, self._send = name, send
        self._finish: Finish | None = None
        self._is_reported = False

    def on_delta(self, delta: Delta) -> None:
        """More output."""
        if delta.vectors:  # The first is no sign that the answer has begun: another worker may begin again.
            self._send(Output(self._name, (), vectors=delta.vectors))
            return
        usage = None
        if delta.token_ids:
            self.first_output()
            if not self._is_reported:
                self._is_reported, usage = True, self.first_usage()
        if not delta.token_ids and not delta.prompt_logprobs:
            return  # Text that was held back: it is made anew over there.
        logprobs = tuple(map(_by_id, delta.logprobs, delta.token_ids)) or None
        prompt = tuple(_by_id(each, each.token_id) for each in delta.prompt_logprobs)
        self._send(Output(self._name, delta.token_ids, logprobs, None, usage, prompt))
        self.count(len(delta.token_ids))

    def hand_back(self, error: PenstockError) -> None:
        """End it while it waits here: its cell may have another worker for it."""
        if self._waiting:
            self.fail(error)

    def _break(self, error: PenstockError, *, can_resume: bool) -> None:
        """Its worker failed: it goes back. Its cell alone knows all places where it could go on, and how
        often it may.
        """
        self.fail(error)

    def on_finish(self, finish: Finish) -> None:
        """The end."""
        self._finish = self.ended(finish)
        self.choice_finished(0, self._finish)

    def complete(self) -> None:
        """It has ended well."""
        finish = self._finish
        assert finish is not None, "what is complete has an end"
        stop = finish.stop if isinstance(finish.stop, int) else None
        self._end(RequestFinished(reason=finish.reason, usage=finish.usage, stop_token_id=stop))

    def send_error(self, error: Exception) -> None:
        """It failed: in its cell another worker, or another cell, may have it."""
        self._end(failed(error, self._finish.usage if self._finish is not None else Usage()))

    def _end(self, finished: RequestFinished) -> None:
        self._send(Output(self._name, (), finish=finished))
        self.exchange.end()


def failed(error: Exception, usage: Usage | None = None) -> RequestFinished:
    """The end of a guest that failed with this error. Want of room is load, and no failure of this cell."""
    kind, words = type(error).__name__, str(error)
    if isinstance(error, Overloaded):
        kind = "WorkerBusy"
    elif not isinstance(error, PenstockError):
        kind, words = "EngineFault", "the cell met a bug"
    return RequestFinished(
        reason=FinishReason.ERROR,
        usage=usage or Usage(),
        error=words,
        error_kind=kind,
        param=error.param if isinstance(error, ClientError) else None,
    )


def refuse(exchange: Exchange, error: Exception) -> None:
    """Count one that was not accepted."""
    exchange.error, exchange.outcome = error, outcome_of(error)
    exchange.end()


def _by_id(each: TextLogprob, token_id: int) -> TokenLogprob:
    top = tuple((i, value) for i, (_, _, value) in zip(each.top_ids, each.top, strict=False))
    return TokenLogprob(token_id, each.logprob or 0.0, top, each.rank)
