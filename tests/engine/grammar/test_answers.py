"""Answers that match a grammar are the same answer however they are computed, and always match."""

import json
import re
from array import array
from functools import cache
from typing import Any

import jsonschema
import msgspec
import pytest
from device_driver import device_runner
from engine_driver import Answer, tiny_runner
from knowing_proposer import KnowingProposer

pytest.importorskip("llguidance")

from demo_grammars import MODEL, tokens

from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.engine import runner as runner_module
from penstock.engine.core import EngineCore, build_core
from penstock.engine.grammar.compiler import CompiledGrammar, GrammarCompiler, compile_grammar
from penstock.engine.native.library import KernelsUnavailable, NativeLibrary
from penstock.engine.runner import Runner
from penstock.errors import InvalidRequest
from penstock.protocol.worker import Submit
from penstock.protocol.worker_parts import Grammar
from penstock.text.tokenizer import Tokenizer
from penstock.types import FinishReason, RequestId, SamplingParams

PERSON = {
    "type": "object",
    "properties": {
        "full_name_of_the_person": {"type": "string", "maxLength": 24},
        "age_in_years": {"type": "integer", "minimum": 0, "maximum": 150},
        "favourite_animals": {
            "type": "array",
            "items": {"enum": ["cat", "dog"]},
            "minItems": 1,
            "maxItems": 3,
        },
    },
    "required": ["full_name_of_the_person", "age_in_years", "favourite_animals"],
    "additionalProperties": False,
}
FORMS: tuple[dict[str, Any], ...] = (
    {"json": PERSON},
    {"regex": r"[a-z]{3,12}@[a-z]{2,9}\.com"},
    {"choice": ["an apple", "an orange", "a pear"]},
    {"grammar": 'start: "x" ("+" NUMBER)* "."\nNUMBER: /[0-9]{1,3}/'},
)
PROMPTS = ("Hello", "Tell me about a person who lives in a small town and has a pet.", "x", "A list:")


@cache
def compiled(form: bytes, **how: Any) -> CompiledGrammar:
    return compile_grammar(Grammar(form=form, **how), tokens())


class Engine:
    """The real engine around the demo model, whose requests may have grammars."""

    def __init__(self, **config: object) -> None:
        settings: dict[str, object] = {"dtype": "float32", "kv_memory_bytes": 8 << 20, "kernels": "torch"}
        settings |= config
        make = device_runner if settings.pop("on_device", False) else tiny_runner
        runner = make(MODEL, **settings)
        runner.use_grammars(tokens())
        self.core: EngineCore = build_core(runner, EngineSettings(**settings), b"k" * 32, SystemClock())
        self.tokenizer = Tokenizer.load(MODEL)
        self.asked = 0

    def ask(self, *asked: dict[str, Any], until: int | None = None) -> list[Answer]:
        """Answers to requests that start together; `until`: no longer than until the first has so many
        tokens.
        """
        answers = {}
        for each in asked:
            self.asked += 1
            request_id = RequestId(f"r{self.asked}")
            answers[request_id] = Answer()
            form = msgspec.json.encode(each["form"]) if each["form"] else b""
            grammar = Grammar(form=form, **each.get("how", {}))
            message = Submit(
                request_id=request_id,
                prompt=array("i", self.tokenizer.encode(each.get("prompt", "Hello"))).tobytes(),
                sampling=each["sampling"],
                resumed=array("i", each.get("resumed", ())).tobytes(),
                grammar=grammar,
            )
            self.core.submit(0, message, 0, compiled(grammar.form, **each.get("how", {})))
        first = next(iter(answers.values()))
        while self.core.has_work and (until is None or len(first.token_ids) < until):
            for output in self.core.step().get(0, []):
                if (answer := answers.get(output.request_id)) is None:
                    continue  # Of one that was aborted.
                answer.token_ids += output.token_ids
                answer.logprobs += output.logprobs or ()
                if output.finish is not None:
                    answer.finish, answer.error = output.finish.reason, output.finish.error
                    answer.stop_token_id = output.finish.stop_token_id
                    answer.usage = output.finish.usage
        return list(answers.values())

    def text(self, answer: Answer) -> str:
        return self.tokenizer.decode(answer.token_ids)


def sampling(seed: int, **how: Any) -> SamplingParams:
    settings = {"temperature": 1.3, "max_tokens": 200, "stop_token_ids": tokens().eos_ids} | how
    return SamplingParams(seed=seed, **settings)


def sampling_with(asked: dict[str, Any], **how: Any) -> SamplingParams:
    return msgspec.structs.replace(asked["sampling"], **how)


def check(form: dict[str, Any], text: str) -> None:
    if "json" in form:
        jsonschema.validate(json.loads(text), form["json"])
    elif "regex" in form:
        assert re.fullmatch(form["regex"], text)
    elif "choice" in form:
        assert text in form["choice"]
    else:
        assert re.fullmatch(r"x(\+[0-9]{1,3})*\.", text)


def requests(**how: Any) -> list[dict[str, Any]]:
    """Every form with every prompt, and every way to draw."""
    ways = (
        {"temperature": 0.0},
        {"temperature": 1.5},
        {"temperature": 1.0, "top_k": 30, "top_p": 0.9},
        {"temperature": 1.2, "repetition_penalty": 1.3, "presence_penalty": 0.4, "min_tokens": 3},
        {"temperature": 0.9, "min_p": 0.02, "logit_bias": ((9, 5.0), (11, -100.0))},
    )
    return [
        {"form": form, "prompt": prompt, "sampling": sampling(i + 7 * j, **ways[(i + j) % len(ways)], **how)}
        for i, form in enumerate(FORMS)
        for j, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    engine = Engine()
    return [engine.ask(each)[0] for each in requests()]


def test_every_answer_matches_and_ends_with_stop(alone: list[Answer]) -> None:
    engine = Engine()
    for each, answer in zip(requests(), alone, strict=True):
        assert answer.finish is FinishReason.STOP, (each, engine.text(answer))
        check(each["form"], engine.text(answer))
        assert answer.usage is not None
        assert answer.usage.completion_tokens - len(answer.token_ids) in (0, 1), "all but a stop token"


@pytest.mark.parametrize(
    "config",
    [
        {"overlap": "on"},
        {"step_tokens": 32, "max_running": 3},
        {"step_tokens": 64, "max_running": 16, "kv_memory_bytes": 450_000, "overlap": "on"},
        {"prefix_cache": False},
        {"host_kv_memory_bytes": 1 << 20, "kv_memory_bytes": 450_000},
    ],
    ids=["overlap", "small-steps", "preempted", "no-cache", "host-tier"],
)
def test_an_answer_does_not_depend_on_what_else_runs(alone: list[Answer], config: dict[str, Any]) -> None:
    engine = Engine(**config)
    for _ in range(2):  # The second time prompts are cached.
        answers = engine.ask(*requests())
        assert [each.token_ids for each in answers] == [each.token_ids for each in alone]
        assert [each.finish for each in answers] == [each.finish for each in alone]
    if config.get("kv_memory_bytes"):
        assert engine.core.stats().preemptions > 0


@pytest.mark.parametrize(("kv_memory_bytes", "nth"), [(8 << 20, 6), (200_000, 3)], ids=["roomy", "preempted"])
def test_a_device_follows_grammars_too(alone: list[Answer], kv_memory_bytes: int, nth: int) -> None:
    """Its steps are launched before the host knows what the ones before have drawn."""
    how = {"on_device": True, "overlap": "on", "max_model_len": 0, "max_running": 8, "step_tokens": 64}
    engine = Engine(kv_memory_bytes=kv_memory_bytes, **how)
    asked = requests()
    asked = [
        each | {"sampling": sampling_with(each, logprobs=1 if i % 2 else None)}
        for i, each in enumerate(asked)
    ]
    answers = engine.ask(*asked[::nth])
    assert [each.token_ids for each in answers] == [each.token_ids for each in alone[::nth]]
    assert [each.finish for each in answers] == [each.finish for each in alone[::nth]]
    assert all(-1e4 < each.logprob <= 0 for answer in answers for each in answer.logprobs)
    assert (engine.core.stats().preemptions > 0) == (kv_memory_bytes < 1 << 20)


@pytest.mark.parametrize(("overlap", "max_tokens"), [("on", 1), ("off", 6)])
def test_a_device_writes_forced_tokens_whoever_takes_the_draw(overlap: str, max_tokens: int) -> None:
    asked = requests(max_tokens=max_tokens)[0]
    engine = Engine(on_device=True, overlap=overlap, max_model_len=0, max_running=8, step_tokens=64)
    assert engine.ask(asked)[0].token_ids == Engine().ask(asked)[0].token_ids


def test_log_probabilities_change_no_token_and_are_finite(alone: list[Answer]) -> None:
    answers = Engine().ask(*requests(logprobs=2))
    assert [each.token_ids for each in answers] == [each.token_ids for each in alone]
    for answer in answers:
        assert [each.token_id for each in answer.logprobs] == answer.token_ids
        assert all(-1e4 < each.logprob <= 0 for each in answer.logprobs)


def test_native_kernels_follow_grammars_too() -> None:
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        pytest.skip(str(why))
    engine = Engine(kernels="native", dtype="bfloat16")
    for each, answer in zip(requests(), engine.ask(*requests()), strict=True):
        check(each["form"], engine.text(answer))


def test_an_answer_continues_elsewhere_from_any_token(alone: list[Answer]) -> None:
    first, second = Engine(), Engine()
    for each, whole in zip(requests()[:6], alone, strict=False):
        for cut in range(1, len(whole.token_ids) - 1, 5):
            (part,) = first.ask(each, until=cut)
            first.core.abort(0, tuple(RequestId(f"r{i}") for i in range(first.asked + 1)))
            (rest,) = second.ask(each | {"resumed": part.token_ids})
            assert part.token_ids + rest.token_ids == whole.token_ids


def test_a_resumed_answer_may_have_been_cut_within_a_forced_run(alone: list[Answer]) -> None:
    engine, whole = Engine(), alone[0]
    for cut in range(1, 12):
        (rest,) = engine.ask(requests()[0] | {"resumed": whole.token_ids[:cut]})
        assert rest.token_ids == whole.token_ids[cut:]


def test_cut_answers_end_with_length() -> None:
    engine = Engine()
    whole = engine.ask(requests()[0])[0]
    for length in (1, 2, 3, 5, 9, len(whole.token_ids) - 1):
        asked = requests(max_tokens=length)[0]
        (answer,) = engine.ask(asked)
        assert answer.token_ids == whole.token_ids[:length]
        assert answer.finish is FinishReason.LENGTH
    (answer,) = engine.ask(requests(max_tokens=len(whole.token_ids))[0])
    assert answer.finish is FinishReason.STOP


def test_forced_tokens_take_no_step_each() -> None:
    engine = Engine()
    (answer,) = engine.ask(requests()[0])
    assert answer.usage is not None
    assert answer.usage.steps < 0.7 * len(answer.token_ids)


def test_a_grammar_begins_behind_a_marker() -> None:
    engine = Engine()
    asked = {
        "form": {"choice": ["left", "right"]},
        "how": {"begins_after": "</think>", "begins_within": 20},
        "sampling": sampling(5),
    }
    (answer,) = engine.ask(asked)
    text = engine.text(answer)
    assert answer.finish is FinishReason.STOP
    free, _, matched = text.partition("</think>")
    assert matched in ("left", "right"), text
    assert len(engine.tokenizer.encode(free)) >= 10
    (again,) = Engine().ask(asked | {"resumed": answer.token_ids[:8]})
    assert answer.token_ids[:8] + again.token_ids == answer.token_ids


def test_min_tokens_does_not_hold_a_complete_grammar_back() -> None:
    engine = Engine()
    (answer,) = engine.ask({"form": {"choice": ["a", "ab"]}, "sampling": sampling(3, min_tokens=50)})
    assert engine.text(answer) in ("a", "ab")
    assert answer.finish is FinishReason.STOP


def begin_with(text: str) -> tuple[int, ...]:
    return tuple(Tokenizer.load(MODEL).encode(text))


THINK: dict[str, Any] = {"opens_with": "<think>", "begins_after": "</think>"}


@pytest.mark.parametrize("within", [0, 1, 5])
def test_a_reasoning_is_closed_after_its_bound(within: int) -> None:
    """A section that the prompt opened, and one that the answer opens."""
    engine = Engine()
    asked: dict[str, Any] = {"form": None, "sampling": sampling(5, max_tokens=40, min_tokens=30)}
    (begun,) = engine.ask(asked | {"how": {"begins_after": "</think>", "begins_within": within}})
    close = begin_with("</think>")
    assert tuple(begun.token_ids[within : within + len(close)]) == close
    opening = begin_with("<think>")
    (opened,) = engine.ask(asked | {"how": THINK | {"begins_within": within}, "resumed": opening})
    assert tuple(opened.token_ids[within : within + len(close)]) == close


def test_a_bound_writes_nothing_into_an_answer_without_reasoning() -> None:
    engine = Engine()
    asked: dict[str, Any] = {"form": None, "sampling": sampling(5, max_tokens=40, min_tokens=30)}
    (bounded,) = engine.ask(asked | {"how": THINK | {"begins_within": 4}})
    (free,) = engine.ask(asked | {"how": THINK})
    assert "think>" not in engine.text(free)
    assert bounded.token_ids == free.token_ids


def test_a_grammar_holds_from_the_first_token_where_no_reasoning_begins() -> None:
    engine = Engine()
    asked: dict[str, Any] = {"form": FORMS[0], "how": THINK, "sampling": sampling(5)}
    (answer,) = engine.ask(asked)
    check(FORMS[0], engine.text(answer))
    biased = sampling(5, logit_bias=((begin_with("<think>")[0], 100.0),))
    (opened,) = engine.ask(asked | {"sampling": biased, "how": THINK | {"begins_within": 6}})
    thought, _, rest = engine.text(opened).partition("</think>")
    assert thought.startswith("<think>")
    check(FORMS[0], rest)
    (again,) = Engine().ask(
        asked | {"sampling": biased, "how": THINK | {"begins_within": 6}, "resumed": opened.token_ids[:4]}
    )
    assert opened.token_ids[:4] + again.token_ids == opened.token_ids


def long_and_forced() -> list[dict[str, Any]]:
    form = {"regex": "[a-z]{5,20} is the answer[a-z]{2,9}"}
    asked = [{"form": form, "sampling": sampling(i, logprobs=1 if i == 2 else None)} for i in (1, 2)]
    return asked + requests()[:3]


@cache
def undisturbed() -> list[Answer]:
    return Engine().ask(*long_and_forced())


@pytest.mark.parametrize(("where", "overlap"), [("results", "off"), ("results", "on"), ("_draw", "on")])
def test_a_step_that_runs_out_of_memory_behind_its_draws_is_drawn_again(
    monkeypatch: pytest.MonkeyPatch, where: str, overlap: str
) -> None:
    whole = undisturbed()
    owner = runner_module if where == "results" else Runner
    plain, calls = getattr(owner, where), [0]

    def fails(*args: Any) -> Any:
        calls[0] += 1
        if calls[0] in (3, 8):  # Each time smaller steps follow; one of a single token may not fail.
            raise MemoryError("no room")
        return plain(*args)

    monkeypatch.setattr(owner, where, fails)
    answers = Engine(overlap=overlap).ask(*long_and_forced())
    assert calls[0] > 10
    assert [each.token_ids for each in answers] == [each.token_ids for each in whole]
    assert [each.finish for each in answers] == [each.finish for each in whole]


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_speculation_changes_no_answer(alone: list[Answer], overlap: str) -> None:
    """Each draft is drawn behind the state of the grammar that those before it have left."""
    engine = Engine(overlap=overlap, speculation="ngram", draft_worth=0.0)
    texts = [
        [*engine.tokenizer.encode(each["prompt"]), *answer.token_ids]
        for each, answer in zip(requests(), alone, strict=True)
    ]
    engine.core._runner.proposer = KnowingProposer(texts, wrong_every=5)
    for answers in (engine.ask(*requests()), [engine.ask(each)[0] for each in requests()[::3]]):
        expected = alone if len(answers) == len(alone) else alone[::3]
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
        assert [each.finish for each in answers] == [each.finish for each in expected]
    stats = engine.core.stats()
    assert 10 < stats.accepted_tokens < stats.drafted_tokens
    (scored,) = engine.ask(requests(logprobs=1)[0])
    assert scored.token_ids == alone[0].token_ids
    assert len(scored.logprobs) >= len(scored.token_ids)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_forced_stop_token_ends_the_answer(logprobs: int | None) -> None:
    engine = Engine()
    form = {"regex": "(x|y) the answer is forty-two"}
    (whole,) = engine.ask({"form": form, "sampling": sampling(1)})
    cut = 4
    assert cut < len(whole.token_ids)
    stop = whole.token_ids[cut]
    assert stop not in whole.token_ids[:cut]
    how = sampling(1, logprobs=logprobs, stop_token_ids=(*tokens().eos_ids, stop))
    (answer,) = engine.ask({"form": form, "sampling": how})
    assert answer.token_ids == whole.token_ids[:cut]
    assert (answer.finish, answer.stop_token_id) == (FinishReason.STOP, stop)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == cut + 1


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_a_grammar_that_allows_only_stop_tokens_wins_over_min_tokens(kernels: str) -> None:
    try:
        NativeLibrary()
    except KernelsUnavailable as why:
        if kernels == "native":
            pytest.skip(str(why))
    engine = Engine(kernels=kernels, dtype="bfloat16" if kernels == "native" else "float32")
    stops = tuple(i for i in range(256) if tokens().tokenizer.token_bytes(i) in (b"7", b"8"))
    assert len(stops) == 2
    how = sampling(1, min_tokens=5, stop_token_ids=(*tokens().eos_ids, *stops))
    (answer,) = engine.ask({"form": {"regex": "[ab][78][ab]{9}"}, "sampling": how})
    assert answer.error is None
    assert answer.finish is FinishReason.STOP
    assert answer.stop_token_id in stops
    assert len(answer.token_ids) == 1


CALL = {
    "type": "object",
    "properties": {"name": {"enum": ["greet"]}, "arguments": PERSON},
    "required": ["name", "arguments"],
    "additionalProperties": False,
}
UNHELD = {"name": "greet", "parameters": {"type": "object", "not": {}}}
CALLS = {"calls": {"format": "hermes", "tools": [{"name": "greet", "parameters": PERSON}]}}


def test_a_call_obeys_its_schema_from_its_mark_on_and_text_follows() -> None:
    """A bias makes the model begin a call wherever it may."""
    engine = Engine()
    (mark,) = begin_with("<tool_call>")
    how = sampling(5, logit_bias=((mark, 100.0),), max_tokens=300)
    asked: dict[str, Any] = {"form": CALLS, "how": {"call_mark": "<tool_call>"}, "sampling": how}
    (answer,) = engine.ask(asked)
    parts = engine.tokenizer.decode(answer.token_ids, skip_special_tokens=False).split("<tool_call>")
    assert parts[0] == ""
    assert len(parts) > 3, "one follows the other"
    for part in parts[1:-1]:
        jsonschema.validate(json.loads(part), CALL)
    for cut in (1, 7, 60, 150):
        (again,) = Engine(step_tokens=32, overlap="on").ask(asked | {"resumed": answer.token_ids[:cut]})
        assert answer.token_ids[:cut] + again.token_ids == answer.token_ids


def test_an_answer_without_a_call_is_free() -> None:
    engine = Engine()
    asked: dict[str, Any] = {"form": CALLS, "sampling": sampling(5, max_tokens=30)}
    (offered,) = engine.ask(asked | {"how": {"call_mark": "<tool_call>"}})
    (plain,) = engine.ask(asked | {"form": None})
    assert offered.token_ids == plain.token_ids
    assert offered.finish == plain.finish


def test_a_call_that_another_worker_began_without_a_grammar_goes_on() -> None:
    begun = begin_with('<tool_call>{"nam')[:-1] + begin_with(" no call </tool_call> and")
    asked = {"form": CALLS, "sampling": sampling(5, max_tokens=40), "resumed": begun}
    (answer,) = Engine().ask(asked | {"how": {"call_mark": "<tool_call>", "is_optional": True}})
    assert answer.finish in (FinishReason.STOP, FinishReason.LENGTH)
    (failed,) = Engine().ask(asked | {"how": {"call_mark": "<tool_call>"}})
    assert failed.finish is FinishReason.ERROR


def test_what_is_optional_is_passed_over_where_it_cannot_be_enforced() -> None:
    compiler = GrammarCompiler(tokens())
    try:
        wrong = msgspec.json.encode({"calls": {"format": "hermes", "tools": [UNHELD]}})
        wrong = Grammar(form=wrong, call_mark="<tool_call>")
        with pytest.raises(InvalidRequest):
            compiler.compile(b"", wrong).result()
        assert not compiler.compile(b"", msgspec.structs.replace(wrong, is_optional=True)).result().call_mark
    finally:
        compiler.close()
