"""Compiling: tenants in turn, what no request waits for is not begun, and what was refused is remembered."""

import json
import os
import signal
import threading
from collections.abc import Iterator

import msgspec
import pytest

pytest.importorskip("llguidance")

from demo_grammars import tokens

from penstock.config.tree import LimitsConfig
from penstock.engine.grammar import trial
from penstock.engine.grammar.compiler import (
    CACHED_PER_TENANT_MAX,
    CompiledGrammar,
    GrammarCompiler,
    compile_grammar,
)
from penstock.engine.grammar.trial import SchemaTrials
from penstock.errors import InvalidRequest, WorkerUnavailable
from penstock.protocol.needs import calls_schema
from penstock.protocol.openai_validate import parse_chat
from penstock.protocol.worker_parts import Grammar


def pattern(text: str) -> Grammar:
    return Grammar(form=msgspec.json.encode({"regex": text}))


class Watched(GrammarCompiler):
    """Compiles without a trial, one after the other, when it is let to."""

    def __init__(self) -> None:
        super().__init__(tokens())
        self.begun: list[bytes] = []
        self.may_go_on, self.one_at_a_time = threading.Event(), threading.Lock()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        assert self.may_go_on.wait(30)
        with self.one_at_a_time:
            self.begun.append(grammar.form)
        if b"boom" in grammar.form:
            raise OSError("no memory")
        return compile_grammar(grammar, tokens())


@pytest.fixture
def compiler() -> Iterator[Watched]:
    watched = Watched()
    yield watched
    watched.may_go_on.set()
    watched.close()


def test_tenants_take_turns(compiler: Watched) -> None:
    many = [pattern(f"a{i}") for i in range(10)]
    futures = [compiler.compile(b"many", each) for each in many]
    futures += [compiler.compile(b"few", pattern("b")), compiler.compile(b"other", pattern("c"))]
    compiler.may_go_on.set()
    for future in futures:
        future.result(30)
    # Two of the first tenant were begun before the others came; one more may be beside them.
    assert {pattern("b").form, pattern("c").form} <= set(compiler.begun[:6])


def test_what_no_request_waits_for_is_not_compiled(compiler: Watched) -> None:
    first = [compiler.compile(b"t", pattern(f"a{i}")) for i in range(2)]  # The threads are busy with these.
    gone, shared = pattern("gone"), pattern("shared")
    compiler.compile(b"t", gone)
    assert compiler.compile(b"t", shared) is compiler.compile(b"t", shared)
    compiler.cancel(b"t", gone)
    compiler.cancel(b"t", shared)
    compiler.cancel(b"t", pattern("never asked for"))
    compiler.may_go_on.set()
    compiler.compile(b"t", shared).result(30)
    for future in first:
        future.result(30)
    assert gone.form not in compiler.begun
    assert compiler.begun.count(shared.form) == 1
    assert compiler.cached(b"t", gone) is None


def test_a_bound_on_the_reasoning_compiles_nothing_again(compiler: Watched) -> None:
    compiler.may_go_on.set()
    thought = [
        msgspec.structs.replace(pattern("a"), begins_after="</think>", begins_within=bound)
        for bound in (8, 9, None)
    ]
    made = compiler.compile(b"t", thought[0]).result(30)
    assert made.begins_within is None
    for each in thought:
        found = compiler.cached(b"t", each)
        assert isinstance(found, CompiledGrammar)
        assert found.first is made.first
        assert found.bounded(each).begins_within == each.begins_within
    assert len(compiler.begun) == 1


@pytest.mark.parametrize(
    ("parameters", "right", "wrong"),
    [
        (
            {
                "properties": {"v": {"type": "integer"}, "in": {"type": "array", "items": {"$ref": "#"}}},
                "additionalProperties": False,
            },
            {"v": 1, "in": [{"v": 2, "in": []}]},
            {"in": [{"name": "f", "arguments": {}}]},
        ),
        (
            {"properties": {"p": {"$ref": "#/definitions/P"}}, "definitions": {"P": {"type": "integer"}}},
            {"p": 1},
            {"p": "x"},
        ),
        (
            {"properties": {"a": {"type": "integer"}, "b": {"$ref": "#/properties/a"}}},
            {"a": 1, "b": 2},
            {"a": 1, "b": "x"},
        ),
    ],
)
def test_a_call_obeys_a_schema_that_refers_to_itself(
    parameters: dict[str, object], right: object, wrong: object
) -> None:
    functions = [
        {"name": "f", "parameters": parameters | {"type": "object"}},
        {"name": "g", "parameters": {"properties": {"a": {"$ref": "#"}}}},
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}],
        "tools": [{"type": "function", "function": each} for each in functions],
    }
    schema = calls_schema(parse_chat(msgspec.json.encode(body), LimitsConfig()))
    found = compile_grammar(Grammar(form=msgspec.json.encode({"json": schema})), tokens()).first
    for arguments, fits in ((right, True), (wrong, False)):
        ids = tokens().tokenizer.encode(json.dumps([{"name": "f", "arguments": arguments}]))
        assert (found.deep_copy().validate_tokens(list(ids)) == len(ids)) is fits


def test_refusals_are_remembered_for_their_tenant_and_failures_are_not(compiler: Watched) -> None:
    compiler.may_go_on.set()
    wrong = pattern("(")
    with pytest.raises(InvalidRequest):
        compiler.compile(b"t", wrong).result(30)
    found = compiler.cached(b"t", wrong)
    assert isinstance(found, InvalidRequest)
    assert found.param == "grammar"
    assert compiler.cached(b"u", wrong) is None
    with pytest.raises(OSError, match="no memory"):
        compiler.compile(b"t", pattern("boom")).result(30)
    assert compiler.cached(b"t", pattern("boom")) is None
    for i in range(CACHED_PER_TENANT_MAX):
        compiler.compile(b"t", pattern(f"x{i}")).result(30)
    assert compiler.cached(b"t", wrong) is None


def test_a_machine_that_cannot_try_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, form = SchemaTrials(), b'{"regex": "a"}'
    try:
        with monkeypatch.context() as patched:
            patched.setattr(trials, "_start", fails)
            os.kill(trials.pid, signal.SIGKILL)
            os.waitid(os.P_PID, trials.pid, os.WEXITED | os.WNOWAIT)
            with pytest.raises(WorkerUnavailable, match="no process"):
                trials.check(form)
        trials.check(form)
        with monkeypatch.context() as patched:
            patched.setattr(os, "fork", fails)
            reply = trial._try(form)
            patched.setattr(trials, "_ask", lambda _form: reply)
            with pytest.raises(WorkerUnavailable, match="no process"):
                trials.check(form)
        with pytest.raises(InvalidRequest):
            trials.check(b'{"regex": "("}')
    finally:
        trials.close()


def fails() -> None:
    raise OSError("no process")
