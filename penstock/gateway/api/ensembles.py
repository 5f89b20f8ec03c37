"""Ensembles: a step of the operator's own before a model, one after it, or both, asked for like a model.

    request -> before(request) -> limits, queue, model, ledger -> after(answer, request) -> answer

Only the request's body and the answer's are touched here. Everything between them is what happens to any
request, with the ensemble's name where clients and the ledger see the model that was asked for.

The steps of an ensemble run in a process of their own (`StepProcess`; ensemble_process.py is the other
side): one call at a time, tenants in turn, each call with a bound on its time. A process that had to be ended
is started again by the next call.
"""

import asyncio
import os
import sys
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import msgspec

from penstock.config.routing import EnsembleConfig
from penstock.config.tree import Config
from penstock.errors import ConfigError, EnsembleFailed, InvalidRequest, Overloaded, PenstockError
from penstock.gateway.api.ensemble_process import (
    BROKEN,
    FAILED,
    FRAME_BYTES_MAX,
    LENGTH,
    NO_MEMORY,
    OK,
    REFUSED,
)
from penstock.gateway.http.errors import error_response
from penstock.gateway.http.exchange import Exchange, Response, outcome_of
from penstock.gateway.identity.tenants import Caller
from penstock.policy.tenant import check_model
from penstock.protocol.stream import DONE, ChatChunks, CompletionChunks, event

START_S_MAX = 120.0
"""For importing the steps, which may bring large packages."""
WAITING_MAX = 256
"""Calls that wait for the process."""
WAITING_MAX_BY_TENANT = 64


class _Ended(Exception):
    """The process ended, or had to be."""


class Turns:
    """One caller at a time, and tenants in turn: a tenant with many calls delays another one by one call."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()
        self._is_taken = False

    async def take(self, tenant: str) -> None:
        """Wait for one's turn, which `give_back` ends.

        Raises:
            Overloaded: too many wait already.
        """
        if not self._is_taken:
            self._is_taken = True
            return
        mine = self._waiting.setdefault(tenant, deque())
        if len(mine) >= WAITING_MAX_BY_TENANT or sum(map(len, self._waiting.values())) >= WAITING_MAX:
            raise Overloaded("Too many requests wait for this ensemble's steps.", retry_after_s=1.0)
        turn = asyncio.get_running_loop().create_future()
        mine.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give_back()
            raise

    def give_back(self) -> None:
        """Let the next one in."""
        assert self._is_taken, "it was somebody's turn"
        while self._waiting:
            tenant, calls = next(iter(self._waiting.items()))
            turn = calls.popleft() if calls else None
            del self._waiting[tenant]
            if calls:
                self._waiting[tenant] = calls  # To the end of the row.
            if turn is not None and not turn.done():
                turn.set_result(None)
                return
        self._is_taken = False


class StepProcess:
    """The steps of one ensemble."""

    def __init__(self, ensemble: EnsembleConfig) -> None:
        self._ensemble = ensemble
        self._process: asyncio.subprocess.Process | None = None
        self._turns = Turns()

    async def start(self) -> None:
        """Import the steps.

        Raises:
            ConfigError: that cannot be done.
        """
        try:
            await self._running()
        except _Ended as error:
            raise ConfigError(f"ensembles: {self._ensemble.name}: {error}") from error

    async def call(self, entry: str, tenant: str, *arguments: object) -> Any:  # noqa: ANN401 - JSON.
        """The entry point's result for the arguments.

        Raises:
            InvalidRequest: it refuses them (ValueError).
            EnsembleFailed: it fails on them, or takes too much for them.
            Overloaded: too many wait for it.
        """
        await self._turns.take(tenant)
        try:
            kind, data = await self._asked(entry, arguments)
        except _Ended as error:
            raise self._failed(entry, str(error)) from error
        finally:
            self._turns.give_back()
        if kind == OK:
            return msgspec.json.decode(data)
        text = data.decode()
        if kind == REFUSED:
            raise InvalidRequest(text or f"{entry} refuses this.", code="refused_by_ensemble")
        assert kind in (FAILED, NO_MEMORY)
        if kind == FAILED:
            raise self._failed(entry, f"raised {text}")
        raise self._failed(entry, f"took more than {self._ensemble.memory_bytes} bytes of memory")

    async def close(self) -> None:
        """End the process, whatever it does."""
        await self._stop()

    def _failed(self, entry: str, why: str) -> EnsembleFailed:
        return EnsembleFailed(f"The ensemble '{self._ensemble.name}' failed: {entry} {why}.")

    async def _asked(self, entry: str, arguments: tuple[object, ...]) -> tuple[bytes, bytes]:
        process = await self._running()
        timeout_s, is_over = self._ensemble.timeout_s, False
        try:
            async with asyncio.timeout(timeout_s):
                kind, data = await _exchanged(process, {"entry": entry, "arguments": arguments})
            is_over = kind != NO_MEMORY  # After that, what it holds is not worth keeping.
        except TimeoutError:
            raise _Ended(f"took more than {timeout_s:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            raise _Ended(f"was ended (exit code {await self._stop()})") from None
        finally:
            if not is_over:
                await self._stop()
        return kind, data

    async def _running(self) -> asyncio.subprocess.Process:
        if self._process is not None and self._process.returncode is None:
            return self._process
        ensemble = self._ensemble
        hidden = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        self._process = process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "penstock.gateway.api.ensemble_process",
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=1 << 20,
            env=hidden | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        )  # fmt: skip
        path = os.path.abspath(ensemble.path) if ensemble.path else ""
        entries = [entry for entry in (ensemble.before, ensemble.after) if entry]
        frame = {
            "path": path, "entries": entries, "timeout_s": ensemble.timeout_s,
            "memory_bytes": ensemble.memory_bytes,
        }  # fmt: skip
        try:
            async with asyncio.timeout(START_S_MAX):
                kind, data = await _exchanged(process, frame)
        except TimeoutError:
            await self._stop()
            raise _Ended(f"importing {' and '.join(entries)} took more than {START_S_MAX:g} s") from None
        except (OSError, asyncio.IncompleteReadError):
            code = await self._stop()
            raise _Ended(f"importing {' and '.join(entries)} ended the process (exit code {code})") from None
        except BaseException:
            await self._stop()
            raise
        if kind == BROKEN:
            await self._stop()
            raise _Ended(f"{' and '.join(entries)} cannot be imported: {data.decode()}")
        return process

    async def _stop(self) -> int | None:
        process, self._process = self._process, None
        if process is None:
            return None
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


async def _exchanged(process: asyncio.subprocess.Process, frame: dict[str, Any]) -> tuple[bytes, bytes]:
    assert process.stdin is not None
    assert process.stdout is not None
    data = msgspec.json.encode(frame)
    process.stdin.write(LENGTH.pack(len(data)) + data)
    await process.stdin.drain()
    head = await process.stdout.readexactly(1 + LENGTH.size)
    (length,) = LENGTH.unpack(head[1:])
    if length > FRAME_BYTES_MAX:
        raise _Ended(f"returned more than {FRAME_BYTES_MAX} bytes")
    return head[:1], await process.stdout.readexactly(length)


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
        self._steps = {name: StepProcess(each) for name, each in self._by_name.items()}
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
