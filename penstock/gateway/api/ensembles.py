"""Ensembles: a step of the operator's own before a model, one after it, or both, asked for like a model.

    request -> before(request) -> limits, queue, model, ledger -> after(answer, request) -> answer

Only the request's body and the answer's are touched here. Everything between them is what happens to any
request, with the ensemble's name where clients and the ledger see the model that was asked for.
"""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any, cast

import msgspec

from penstock.config.routing import EnsembleConfig
from penstock.config.tree import Config
from penstock.errors import EnsembleFailed, PenstockError
from penstock.gateway.ensembles.steps import Steps
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.exchange import Exchange, Response, outcome_of
from penstock.gateway.identity.tenants import Caller
from penstock.policy.tenant import check_model
from penstock.protocol.stream import DONE, ChatChunks, CompletionChunks, event

Json = dict[str, Any]
Handler = Callable[[Exchange, Caller], Awaitable[None]]
CHAT = "chat.completion"
_AS_IT_WAS = ("id", "object", "created", "usage")
"""Of an answer: no step says what was used, or when."""


class _Named(msgspec.Struct):
    """As much of a request as says whether it is one for an ensemble."""

    model: str | None = None


_named = msgspec.json.Decoder(_Named)


class Ensembles:
    """All of them, with a process each."""

    def __init__(self, config: Config) -> None:
        self._by_name = {each.name: each for each in config.ensembles}
        self._steps = {name: Steps(each) for name, each in self._by_name.items()}
        self._tasks = set[asyncio.Task[None]]()

    async def start(self) -> None:
        """Import all steps.

        Raises:
            ConfigError: that cannot be done.
        """
        try:
            for each in self._steps.values():
                await each.start()
        except BaseException:
            await self.close()
            raise

    async def close(self) -> None:
        """Let answers have their last step; then the processes end."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for each in self._steps.values():
            await each.close()

    def around(self, handler: Handler) -> Handler:
        """An endpoint that also takes ensembles where it takes models."""

        async def answer(exchange: Exchange, caller: Caller) -> None:
            ensemble = self._wanted(exchange.body)
            if ensemble is not None:
                caller = await self._begin(ensemble, exchange, caller)
            await handler(exchange, caller)

        return answer if self._by_name else handler

    def _wanted(self, body: bytes) -> EnsembleConfig | None:
        try:
            name = _named.decode(body).model
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError):
            return None  # The endpoint says what is wrong.
        return self._by_name.get(name or "")

    async def _begin(self, ensemble: EnsembleConfig, exchange: Exchange, caller: Caller) -> Caller:
        """Make the request the model's."""
        check_model(caller.tenant, ensemble.name)
        asked: Json = msgspec.json.decode(exchange.body)
        body, steps = asked, self._steps[ensemble.name]
        if ensemble.before:
            found = await steps.call(ensemble.before, caller.tenant.id, asked)
            if not isinstance(found, dict):
                raise _wrong(ensemble, ensemble.before, "returned no request")
            body = cast(Json, found)
        body = {**body, "model": ensemble.model}
        if ensemble.after:
            streams, options = body.pop("stream", None) is True, body.pop("stream_options", None)
            shows_usage = isinstance(options, dict) and cast(Json, options).get("include_usage") is True

            def rewrite(response: Response) -> None:
                task = asyncio.ensure_future(
                    self._finish(
                        ensemble, exchange, caller, asked, response, streams=streams, usage=shows_usage
                    )
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

            exchange.rewrite = rewrite
        exchange.asked = ensemble.name
        exchange.body = msgspec.json.encode(body)
        return _allowed(caller, ensemble.model)

    async def _finish(
        self,
        ensemble: EnsembleConfig,
        exchange: Exchange,
        caller: Caller,
        asked: Json,
        response: Response,
        *,
        streams: bool,
        usage: bool,
    ) -> None:
        """Let the step have the answer, and send what it makes of it."""
        before: Json = msgspec.json.decode(response.body)
        try:
            after = await self._steps[ensemble.name].call(ensemble.after, caller.tenant.id, before, asked)
            answer = _checked(ensemble, before, after)
            events = _events(answer, shows_usage=usage) if streams else []
        except PenstockError as error:
            exchange.error, exchange.outcome = error, outcome_of(error)
            exchange.respond(error_response(error))
            return
        if not streams:
            body = msgspec.json.encode(answer)
            exchange.respond(msgspec.structs.replace(response, body=body))
            return
        exchange.begin_stream()
        for each in events:
            exchange.write(each)
        exchange.end(DONE)


def _allowed(caller: Caller, model: str) -> Caller:
    """A caller that may use an ensemble may use its model through it."""
    tenant = caller.tenant
    if not tenant.models and not tenant.adapters:
        return caller  # Nothing is forbidden.
    models = tenant.models | {model} if tenant.models else tenant.models
    adapters = tenant.adapters | {model} if tenant.adapters else tenant.adapters
    return replace(caller, tenant=replace(tenant, models=models, adapters=adapters))


def _wrong(ensemble: EnsembleConfig, entry: str, why: str) -> EnsembleFailed:
    return EnsembleFailed(f"The ensemble '{ensemble.name}' failed: {entry} {why}.")


class _Message(msgspec.Struct):
    content: str | None = None


class _ChatChoice(msgspec.Struct):
    message: _Message


class _TextChoice(msgspec.Struct):
    text: str


class _Chat(msgspec.Struct):
    """As much of an answer as it takes to be one."""

    choices: list[_ChatChoice]


class _Completion(msgspec.Struct):
    choices: list[_TextChoice]


def _checked(ensemble: EnsembleConfig, before: Json, after: object) -> Json:
    """The step's answer, with what is not its to say as it was.

    Raises:
        EnsembleFailed: it is no answer.
    """
    try:
        found = msgspec.convert(after, _Chat if before["object"] == CHAT else _Completion)
    except msgspec.ValidationError as error:
        raise _wrong(ensemble, ensemble.after, f"returned no answer ({error})") from None
    if len(found.choices) != len(before["choices"]):
        raise _wrong(ensemble, ensemble.after, f"returned {len(found.choices)} choices")
    answer = cast(Json, after)
    return {**answer, **{name: before[name] for name in _AS_IT_WAS}, "model": ensemble.name}


def _events(answer: Json, *, shows_usage: bool) -> list[bytes]:
    """A whole answer as the events of a stream: a chunk with all of a choice, one with its end."""
    is_chat = answer["object"] == CHAT
    head: Json = {name: answer.get(name) for name in ("id", "created", "model", "system_fingerprint")}
    head["object"] = ChatChunks.KIND if is_chat else CompletionChunks.KIND
    no_usage: Json = {"usage": None} if shows_usage else {}
    found: list[bytes] = []
    for index, choice in enumerate(answer["choices"]):
        said: Json = {"delta": _delta(choice["message"])} if is_chat else {"text": choice["text"]}
        end: Json = {"delta": {}} if is_chat else {"text": ""}
        logprobs, reason = choice.get("logprobs"), choice.get("finish_reason")
        for part, why, known in ((said, None, logprobs), (end, reason, None)):
            one = {"index": index, **part, "logprobs": known, "finish_reason": why}
            found.append(event(msgspec.json.encode({**head, "choices": [one], **no_usage})))
    if shows_usage:
        found.append(event(msgspec.json.encode({**head, "choices": [], "usage": answer["usage"]})))
    return found


def _delta(message: Json) -> Json:
    calls = message.get("tool_calls") or ()
    delta = {name: value for name, value in message.items() if value is not None and name != "tool_calls"}
    delta = {"role": "assistant", **delta}
    if calls:
        delta["tool_calls"] = [{**call, "index": i} for i, call in enumerate(calls)]
    return delta
