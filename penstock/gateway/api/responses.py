"""The Responses API: `/v1/responses`, over the way that chats go.

A request is made a chat (protocol/responses_chat.py) and answered as one; only the answer is written
otherwise (relay/responses.py). The code here only keeps responses, each for its own tenant, so that a later
request can continue them (gateway/shared/responses.py).
"""

import asyncio
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import msgspec

from penstock.backends.base import Sink
from penstock.clock import NS_PER_S
from penstock.errors import ClientError, InvalidRequest, NotFound, Overloaded, TooLarge, Unsupported
from penstock.gateway.api.generate import Generate, Wording
from penstock.gateway.api.job import RESPONSE_ID, Job, answer_parser
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange, Response
from penstock.gateway.identity.tenants import Caller
from penstock.gateway.relay.reply import Context, Reply
from penstock.gateway.relay.responses import ResponseStream, WholeResponse
from penstock.gateway.shared.keeper import StoreError
from penstock.gateway.shared.responses import RESPONSE_BYTES_MAX, StoredResponse, open_responses
from penstock.protocol.responses import DeletedResponse, InputItem, ResponseBody, ResponseRequest
from penstock.protocol.responses_chat import ResponseChat, chat_of, items_of, parse_response
from penstock.telemetry.catalog import Endpoint
from penstock.types import TenantId

PATH = "/v1/responses/"
REFERENCES_MAX = 128
"""Items of one input that are given by their ids alone."""
_ID = re.compile(r"resp_[0-9a-f]{1,64}")
_ITEM_ID = re.compile(r"(?:msg|rs|fc)_([0-9a-f]{1,64})_[0-9]{1,9}")
_NOT_KEPT = (
    "this server keeps no responses, for its processes share no store (shared.url); send the whole "
    "conversation as 'input'"
)
Finish = Callable[[ResponseBody], None]
"""Called with a response when it is kept, or cannot be."""
_items = msgspec.json.Decoder(list[InputItem])


class _Output(msgspec.Struct, frozen=True):
    """Of a stored response."""

    output: list[InputItem]


_output = msgspec.json.Decoder(_Output)


class Responses:
    """The endpoints, over the services they share."""

    def __init__(self, services: Services, generate: Generate) -> None:
        """Opens the store.

        Raises:
            ConfigError: it cannot be used as configured.
        """
        self._services, self._generate = services, generate
        config = services.config
        self._store = open_responses(config.shared, services.clock, processes=config.server.processes)
        """None: nothing is kept."""
        self._saves = set[asyncio.Task[None]]()

    async def create(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/responses`: a response, whole or streamed as typed events."""
        request, tenant = parse_response(exchange.body), caller.tenant.id
        if self._store is None and request.store:
            raise Unsupported(f"'store' is not supported here: {_NOT_KEPT}.", param="store")
        earlier = await self._earlier(request, tenant)
        request = await self._with_items(request, tenant)
        chat = chat_of(request, earlier)
        self._check_size(len(chat.body))
        items = [*earlier, *items_of(request)]

        def begin(context: Context, job: Job) -> tuple[Reply, Sequence[Sink]]:
            body = _body(context, job, request, is_kept=self._store is not None)
            return _begin(context, job, _Draft(self.save, tenant, chat, items, body))

        try:
            await self._generate.answer_chat(
                exchange, caller, chat.body, Wording(Endpoint.RESPONSES, RESPONSE_ID, begin)
            )
        except ClientError as error:
            raise chat.renamed(error) from None

    async def show(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /v1/responses/{id}`: a response that was stored for the caller's tenant."""
        found = await self._found(_id_of(exchange.path), caller.tenant.id)
        exchange.respond(Response(body=found.body))

    async def delete(self, exchange: Exchange, caller: Caller) -> None:
        """`DELETE /v1/responses/{id}`: forget it."""
        response_id = _id_of(exchange.path)
        await self._found(response_id, caller.tenant.id)
        assert self._store is not None, "it was found there"
        await self._asked(self._store.delete(caller.tenant.id, response_id))
        exchange.respond(Response(body=msgspec.json.encode(DeletedResponse(id=response_id))))

    async def cancel(self, exchange: Exchange, caller: Caller) -> None:
        """`POST /v1/responses/{id}/cancel`: refused, for no response is made in the background; closing its
        connection cancels one that is being answered.
        """
        response_id, _, verb = exchange.path.removeprefix(PATH).rstrip("/").rpartition("/")
        if verb != "cancel":
            raise NotFound(f"This server has no {exchange.path[:128]}.", code="unknown_path")
        await self._found(unquote(response_id), caller.tenant.id)
        raise InvalidRequest(
            "Only a response with 'background' can be cancelled, and this server has none. Closing the "
            "connection cancels a response that is being answered.",
            param="response_id",
            code="response_not_in_background",
        )

    async def close(self) -> None:
        """Finish what is being kept."""
        await asyncio.gather(*self._saves, return_exceptions=True)
        if self._store is not None:
            await self._store.close()

    async def _earlier(self, request: ResponseRequest, tenant: TenantId) -> list[InputItem]:
        """All items of the response that the request follows."""
        name = request.previous_response_id
        if name is None:
            return []
        if self._store is None:
            raise Unsupported(
                f"'previous_response_id' is not supported here: {_NOT_KEPT}.", param="previous_response_id"
            )
        found = await self._load(name, tenant)
        if found is None:
            raise InvalidRequest(
                f"Previous response with id '{name[:128]}' not found.",
                param="previous_response_id",
                code="previous_response_not_found",
            )
        return _items.decode(found.items)

    async def _with_items(self, request: ResponseRequest, tenant: TenantId) -> ResponseRequest:
        """The request with the items that it gives by their ids alone."""
        items = list(items_of(request))
        places = [i for i, item in enumerate(items) if item.type == "item_reference"]
        if not places:
            return request
        if len(places) > REFERENCES_MAX:
            raise InvalidRequest(
                f"'input' has {len(places)} items of type 'item_reference'; at most {REFERENCES_MAX} are "
                "allowed.",
                param="input",
            )
        known: dict[str, Mapping[str | None, InputItem]] = {}
        num_bytes, names = 0, set[str]()
        for i in places:
            name = items[i].id or ""
            if name in names:
                raise InvalidRequest(
                    f"Item with id '{name[:128]}' is given twice.",
                    param=f"input[{i}].id",
                    code="invalid_value",
                )
            names.add(name)
            of = _ITEM_ID.fullmatch(name)
            response_id = f"resp_{of[1]}" if of else ""
            if response_id not in known:
                stored = await self._load(response_id, tenant)
                num_bytes += 0 if stored is None else len(stored.body)
                self._check_size(num_bytes)
                output = [] if stored is None else _output.decode(stored.body).output
                known[response_id] = {item.id: item for item in output}
            if name not in known[response_id]:
                raise InvalidRequest(
                    f"Item with id '{name[:128]}' not found.", param=f"input[{i}].id", code="item_not_found"
                )
            items[i] = known[response_id][name]
        return msgspec.structs.replace(request, input=items)

    def _check_size(self, num_bytes: int) -> None:
        """Bound what a request brings in by ids as the body of a chat that held it all would be."""
        limit = self._services.config.server.body_bytes_max
        if num_bytes > limit:
            raise TooLarge(
                f"The input, with the stored items that it follows, is over the bound of {limit} bytes."
            )

    async def _found(self, response_id: str, tenant: TenantId) -> StoredResponse:
        found = await self._load(response_id, tenant)
        if found is None:
            why = "" if self._store is not None else f" ({_NOT_KEPT})"
            raise NotFound(
                f"Response with id '{response_id[:128]}' not found{why}.",
                param="response_id",
                code="response_not_found",
            )
        return found

    async def _load(self, response_id: str, tenant: TenantId) -> StoredResponse | None:
        if self._store is None or not _ID.fullmatch(response_id):
            return None
        return await self._asked(self._store.load(tenant, response_id))

    async def _asked(self, question: Any) -> Any:  # noqa: ANN401
        try:
            return await question
        except StoreError:
            raise Overloaded("The store of responses does not answer. Try again shortly.") from None

    def save(self, tenant: TenantId, body: ResponseBody, stored: StoredResponse, finish: Finish) -> None:
        """Keep a response, then finish it: it can be asked for as soon as its client has heard its end."""
        task = asyncio.get_running_loop().create_task(self._save(tenant, body, stored, finish))
        self._saves.add(task)
        task.add_done_callback(self._saves.discard)

    async def _save(
        self, tenant: TenantId, body: ResponseBody, stored: StoredResponse, finish: Finish
    ) -> None:
        assert self._store is not None, "only what can be kept is"
        try:
            await self._store.save(tenant, body.id, stored)
        except StoreError as error:
            self._services.log.warning("a response could not be stored", response=body.id, why=str(error))
            body = msgspec.structs.replace(body, store=False)
        finish(body)


class _Draft:
    """A response that is being answered."""

    def __init__(
        self,
        save: Callable[[TenantId, ResponseBody, StoredResponse, Finish], None],
        tenant: TenantId,
        chat: ResponseChat,
        items: Sequence[InputItem],
        body: ResponseBody,
    ) -> None:
        self.body, self.renamed = body, chat.renamed
        self._save, self._tenant, self._items = save, tenant, items

    def keep(self, body: ResponseBody, finish: Finish) -> None:
        """See `Draft.keep`."""
        if not body.store:
            finish(body)
            return
        items = msgspec.json.encode([*self._items, *body.output])
        stored = StoredResponse(body=msgspec.json.encode(body), items=items)
        if stored.num_bytes > RESPONSE_BYTES_MAX:
            finish(msgspec.structs.replace(body, store=False))
            return
        self._save(self._tenant, body, stored, finish)


def _begin(context: Context, job: Job, draft: _Draft) -> tuple[Reply, Sequence[Sink]]:
    parser, clock = answer_parser(job), context.clock

    def now_s() -> int:
        return clock.wall_ns() // NS_PER_S

    if job.request.stream:
        reply = ResponseStream(context, draft, parser, now_s, shows_logprobs=job.logprobs is not None)
        return reply, [reply]
    whole = WholeResponse(context, draft, parser, now_s)
    return whole, [whole]


def _body(context: Context, job: Job, request: ResponseRequest, *, is_kept: bool) -> ResponseBody:
    """The response before its first output: what was asked for, with the model's defaults."""
    defaults, chat = job.model.tokenizer.defaults, job.request
    reasoning, text = request.reasoning, request.text
    temperature = _first(request.temperature, defaults.temperature)
    return ResponseBody(
        id=context.head.id,
        created_at=context.head.created,
        status="in_progress",
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        metadata=request.metadata or {},
        model=context.head.model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=getattr(chat, "prompt_cache_key", None),
        reasoning={
            "effort": None if reasoning is None else reasoning.effort,
            "summary": None if reasoning is None else reasoning.summary or reasoning.generate_summary,
        },
        safety_identifier=getattr(chat, "safety_identifier", None),
        store=is_kept and request.store is not False,
        temperature=temperature,
        text={
            "format": (text and text.format) or {"type": "text"},
            "verbosity": (text and text.verbosity) or "medium",
        },
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=_first(request.top_p, defaults.top_p),
        user=chat.user,
    )


def _first(asked: float | None, default: float | None) -> float:
    return next((each for each in (asked, default) if each is not None), 1.0)


def _id_of(path: str) -> str:
    return unquote(path.removeprefix(PATH).rstrip("/"))
