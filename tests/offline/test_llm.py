"""`LLM`: batches of prompts in a program of one's own."""

import gc
import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from lora_checkpoints import write_adapter_for
from small_llm import SMALL

from penstock import LLM, LoRARequest, SamplingParams, StructuredOutputsParams, TextPrompt, TokensPrompt
from penstock.clock import SystemClock
from penstock.config.engine_settings import EngineSettings
from penstock.errors import ContextTooLong, InvalidRequest, Unsupported, WorkerUnavailable
from penstock.offline import calls
from penstock.offline import engine as engine_module
from penstock.offline import llm as llm_module
from penstock.offline.prompts import ChatOptions, PromptMaker

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
SPREAD = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)

pytestmark = pytest.mark.timeout(180)


def texts(outputs) -> list[str]:
    return [completion.text for output in outputs for completion in output.outputs]


def test_prompts_of_every_form_are_the_same_prompt(llm: LLM) -> None:
    text = "The capital of France is"
    ids = list(llm.get_tokenizer().encode(text, add_special_tokens=True))
    outputs = llm.generate([text, ids, {"prompt": text}, {"prompt_token_ids": ids}], GREEDY)
    assert len(set(texts(outputs))) == 1
    assert [output.prompt for output in outputs] == [text, None, text, None]
    assert all(list(output.prompt_token_ids) == ids and output.finished for output in outputs)
    (alone,), (by_ids,) = llm.generate(text, GREEDY), llm.generate(ids, GREEDY)
    assert texts([alone]) == texts([by_ids]) == texts(outputs[:1])


def test_more_prompts_than_are_on_their_way_at_once_stay_in_order(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(llm_module, "IN_FLIGHT_MAX", 5)
    drawn, limit = 0, 0

    def prompts() -> Iterator[str]:
        nonlocal drawn
        for i in range(40):
            drawn += 1
            yield f"Number {i} and"

    begin = calls.Call.begin

    def counted(call: calls.Call, *args) -> None:
        nonlocal limit
        begin(call, *args)
        limit = max(limit, call.num_running)

    monkeypatch.setattr(calls.Call, "begin", counted)
    lengths = [SamplingParams(max_tokens=1 + i % 7, ignore_eos=True) for i in range(40)]
    outputs = llm.generate(prompts(), lengths)
    assert [output.prompt for output in outputs] == [f"Number {i} and" for i in range(40)]
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1 + i % 7 for i in range(40)]
    assert (drawn, limit) == (40, 5)


def test_a_seed_fixes_an_answer_and_the_llms_seed_all_of_them(llm: LLM, mini: Path) -> None:
    one = SamplingParams(max_tokens=8, seed=11, n=3, ignore_eos=True)
    first, second = llm.generate(["Once", "Once"], one)
    assert texts([first]) == texts([second])
    assert len(set(texts([first]))) == 3, "choices have seeds of their own"
    runs: list[list[str]] = []
    for in_process in (False, True):
        with LLM(str(mini), seed=3, in_process=in_process, **SMALL) as other:
            runs.append(texts(other.generate(["Once", "Once"], SPREAD)))
            assert (other._engine._worker.pid is None) is in_process  # type: ignore
    assert runs[0] == runs[1], "as a child and as a thread"
    assert runs[0][0] != runs[0][1]


def test_log_probabilities_and_times(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    (output,) = llm.generate("The capital of France", params)
    (answer,) = output.outputs
    assert answer.logprobs is not None
    assert answer.cumulative_logprob == pytest.approx(
        sum(found[i].logprob for i, found in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    for token_id, found in zip(answer.token_ids, answer.logprobs, strict=True):
        assert found[token_id].rank == 1, "it is greedy"
        assert len(found) == 3
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    times = output.metrics
    assert times is not None
    assert 0 < times.first_token_s <= times.total_s
    assert times.prefill_s > 0
    assert times.decode_s > 0


def test_a_score_is_the_mean_probability_of_the_second_text(llm: LLM) -> None:
    near, far = llm.score("The capital of France is", [" Paris.", " a hundred dogs."])
    assert 0 < far.outputs.score < near.outputs.score < 1
    tokenizer = llm.get_tokenizer()
    whole = [*tokenizer.encode("The capital of France is"), *tokenizer.encode(" Paris.")]
    assert list(near.prompt_token_ids) == whole
    (output,) = llm.generate([whole], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert output.prompt_logprobs is not None
    behind = [output.prompt_logprobs[-i][whole[-i]].logprob for i in range(1, near.outputs.num_tokens + 1)]  # pyright: ignore
    assert near.outputs.logprob == pytest.approx(sum(behind))
    assert near.outputs.score == pytest.approx(math.exp(sum(behind) / len(behind)))


def test_prompts_that_a_script_makes_itself(llm: LLM) -> None:
    """By the tokenizer, with transformers' names, or with a template of its own."""
    tokenizer, chat = llm.get_tokenizer(), [{"role": "user", "content": "What is the capital of France?"}]
    params = SamplingParams(max_tokens=8, temperature=0)
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True)
    assert isinstance(text, str)
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == text != tokenizer.decode(ids, skip_special_tokens=True)
    spaced = [{"role": "user", "content": "a <|im_end|>  b\u00a0"}]
    shown = tokenizer.apply_chat_template(
        spaced, tokenize=False, chat_template="{{ bos }}{{ messages[0].content }}\n{{ x }}", x="é"
    )
    assert shown == "a <|im_end|>  b\u00a0\né"
    more = tokenizer.apply_chat_template(
        [*chat, {"role": "assistant", "content": "It is"}], tokenize=False, continue_final_message=True
    )
    assert isinstance(more, str)
    assert more.endswith("It is")
    prompts = [text, TextPrompt(prompt=text), TokensPrompt(prompt_token_ids=ids)]
    (right,) = llm.chat(chat, params)
    assert all(output.outputs[0].text == right.outputs[0].text for output in llm.generate(prompts, params))
    end = tokenizer.eos_token_id
    assert end is not None
    assert tokenizer.convert_tokens_to_ids(*tokenizer.convert_ids_to_tokens([end])) == end
    assert end in tokenizer.all_special_ids
    assert len(tokenizer) == tokenizer.vocab_size > end
    (own,) = llm.chat(chat, params, chat_template="{{ messages[0].content }} Say:")
    assert own.prompt == "What is the capital of France? Say:"
    with pytest.raises(InvalidRequest, match="Invalid 'chat_template'"):
        llm.chat(chat, params, chat_template="{% if %}")


def test_templates_of_two_threads_do_not_end_each_other(mini: Path) -> None:
    """Each in a process of its own, for what it does has no price here."""
    source = "{% filter upper %}NAME {{ messages[0].content }}{% endfilter %}"
    maker = PromptMaker(mini, SystemClock())
    options = [ChatOptions(chat_template=source.replace("NAME", name)) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        said = [
            pool.submit(maker.chat_text, [{"role": "user", "content": f"{i}"}], options[i % 2])
            for i in range(6)
        ]
        assert [each.result() for each in said] == [f"{('ONE', 'TWO')[i % 2]} {i}" for i in range(6)]
    maker.close()


def test_structured_outputs_and_stop_strings(llm: LLM) -> None:
    shaped = SamplingParams(max_tokens=8, structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    as_json = SamplingParams(
        max_tokens=40, seed=1, guided_decoding=StructuredOutputsParams(json=json.dumps(schema))
    )
    choice, found = llm.generate(["Is water wet?"] * 2, [shaped, as_json])
    assert texts([choice])[0] in ("yes", "no")
    assert isinstance(json.loads(texts([found])[0])["ok"], bool)
    (whole,) = llm.generate("The capital of France", SamplingParams(temperature=0, max_tokens=12))
    stop = whole.outputs[0].text[4:7]
    (cut,) = llm.generate("The capital of France", SamplingParams(temperature=0, max_tokens=12, stop=stop))
    assert cut.outputs[0].text == whole.outputs[0].text.partition(stop)[0]
    assert (cut.outputs[0].finish_reason, cut.outputs[0].stop_reason) == ("stop", stop)


def test_conversations(llm: LLM) -> None:
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=None))
    assert "Paris" in one.outputs[0].text
    assert one.prompt is not None
    assert "<|im_start|>user" in one.prompt
    begun = [*messages, {"role": "assistant", "content": "The capital"}]
    (more,) = llm.chat([begun], GREEDY, continue_final_message=True)
    assert more.prompt is not None
    assert more.prompt.endswith("The capital")
    marks = [{"role": "user", "content": "<|im_end|>"}]
    (apart,) = llm.chat(marks, GREEDY)
    assert apart.prompt_token_ids.count(2) == 1, "a user's marker is text"


def bad_calls(llm: LLM) -> list[tuple[Callable[[], object], type[Exception], str]]:
    long = [[5] * 5000]
    chat = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    lora = LoRARequest("x", 1, "/nowhere")
    return [
        (lambda: llm.generate(["a", 3]), InvalidRequest, "prompt 1: .*expected text, token ids"),  # type: ignore
        (lambda: llm.generate(["a", ""]), InvalidRequest, "prompt 1: .*empty"),
        (lambda: llm.generate([[1, -1]]), InvalidRequest, "not in the vocabulary"),
        (lambda: llm.generate([[1, "x"]]), InvalidRequest, "prompt_token_ids"),  # type: ignore
        (lambda: llm.generate([{"prompt": "a", "multi_modal_data": {}}]), Unsupported, "multi_modal_data"),
        (lambda: llm.generate(["a", long[0]]), ContextTooLong, "prompt 1: the context has"),
        (lambda: llm.generate("a", SamplingParams(max_tokens=9999)), ContextTooLong, "9999 were asked"),
        (lambda: llm.generate(["a"], [GREEDY] * 2), InvalidRequest, "2 for 1 prompts"),
        (lambda: llm.generate("a", {"max_tokens": 3}), InvalidRequest, "expected SamplingParams"),  # type: ignore
        (lambda: llm.generate("a", SamplingParams(logit_bias={999_999: 1})), InvalidRequest, "logit_bias"),
        (lambda: llm.chat([{"role": "nobody", "content": "x"}]), InvalidRequest, "role"),
        (lambda: llm.chat(chat), Unsupported, "media"),
        (lambda: llm.chat("hello"), InvalidRequest, "expected a list of messages"),  # type: ignore
        (lambda: llm.score("a", [""]), InvalidRequest, "text_2"),
        (lambda: llm.score(["a", "b"], ["c"]), InvalidRequest, "1 texts for 2"),
        (lambda: llm.generate("a", GREEDY, lora_request=lora), InvalidRequest, "/nowhere"),
        (
            lambda: llm.generate("a", SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))),
            InvalidRequest,
            "regex",
        ),
    ]


def test_bad_input_is_a_typed_error_and_ends_what_was_begun(llm: LLM) -> None:
    for call, kind, words in bad_calls(llm):
        with pytest.raises(kind, match=words):
            call()
    backend = llm._engine._backend
    assert backend is not None
    assert backend.num_streams == 0
    assert texts(llm.generate("The capital of France is", GREEDY))


def test_a_call_that_is_interrupted_leaves_nothing_behind(llm: LLM) -> None:
    backend = llm._engine._backend
    assert backend is not None

    def interrupt() -> None:
        while backend.num_streams < 3:
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    endless = SamplingParams(max_tokens=3000, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([f"Number {i}" for i in range(30)], endless)
    thread.join()
    assert backend.num_streams == 0
    assert len(llm.generate(["a", "b"], GREEDY)) == 2, "it is as good as new"


def test_an_llm_that_is_interrupted_while_it_loads_leaves_no_process(mini: Path) -> None:
    code = f"""
import os, signal, threading, time
from penstock import LLM
from penstock.engine import worker
from penstock.fleet.launchers.supervised import SupervisedWorker
import psutil
started = threading.Event()
start = SupervisedWorker.wait_ready
async def interrupted(self, *args):
    while self.pid is None:
        import asyncio
        await asyncio.sleep(0)
    os.kill(os.getpid(), signal.SIGINT)
    await start(self, *args)
SupervisedWorker.wait_ready = interrupted
try:
    LLM({str(mini)!r}, **{SMALL!r})
except KeyboardInterrupt:
    print([child.pid for child in psutil.Process().children()], threading.active_count())
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert (done.stdout.strip(), done.stderr) == ("[] 1", "")


def test_several_threads_may_ask(llm: LLM) -> None:
    expected = texts(llm.generate([f"Number {i}" for i in range(8)], GREEDY))
    found, interval = list[list[str]](), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [
            threading.Thread(
                target=lambda: found.append(texts(llm.generate([f"Number {i}" for i in range(8)], GREEDY)))
            )
            for _ in range(6)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert found == [expected] * 6


def test_an_adapter_that_is_gone_when_the_worker_starts_again_ends_its_requests(
    mini: Path, tmp_path: Path
) -> None:
    fr = LoRARequest("fr", 1, str(write_adapter_for(tmp_path / "fr", mini, seed=1)))
    with LLM(str(mini), **SMALL) as other:
        backend, worker = other._engine._backend, other._engine._worker
        assert backend is not None
        assert worker is not None

        def kill() -> None:
            while backend.progress < 20:
                time.sleep(0.001)
            shutil.rmtree(tmp_path / "fr")
            assert worker.pid is not None
            os.kill(worker.pid, signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        with pytest.raises(WorkerUnavailable, match="the adapter 'fr' cannot be had"):
            other.generate("Once", SamplingParams(max_tokens=3000, ignore_eos=True), lora_request=fr)
        killer.join()
        assert len(other.generate("Once", GREEDY)) == 1


def test_an_adapter_answers_under_its_name(llm: LLM, mini: Path, tmp_path: Path) -> None:
    prompt = "The capital of France is"
    fr = LoRARequest("fr", 1, str(write_adapter_for(tmp_path / "fr", mini, seed=1)))
    plain, adapted = llm.generate([prompt] * 2, GREEDY, lora_request=[None, fr])
    assert texts([plain]) != texts([adapted])
    assert adapted.lora_request == adapted.outputs[0].lora_request == fr
    assert texts(llm.generate(prompt, GREEDY)) == texts([plain])
    other = LoRARequest("fr", 2, str(write_adapter_for(tmp_path / "other", mini, seed=2)))
    with pytest.raises(InvalidRequest, match="is taken by"):
        llm.generate(prompt, GREEDY, lora_request=other)


def test_answers_go_on_when_the_worker_is_killed_and_closing_ends_it(mini: Path, llm: LLM) -> None:
    params = SamplingParams(max_tokens=160, ignore_eos=True, seed=5)
    expected = texts(llm.generate([f"Number {i}" for i in range(6)], params))
    with LLM(str(mini), **SMALL) as other:
        worker = other._engine._worker
        assert worker is not None
        pid = worker.pid
        assert pid is not None
        begun = other.outcomes(
            llm_module.PendingCall(other._engine.prompts.plain(f"Number {i}"), params) for i in range(6)
        )
        backend = other._engine._backend
        assert backend is not None

        over = threading.Event()

        def kill() -> None:
            while not over.wait(0.001):
                if backend.num_streams == 6 and backend.progress >= 10:
                    os.kill(pid, signal.SIGKILL)
                    return

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            found = dict(begun)
        finally:
            over.set()
            killer.join()
        assert texts([found[i] for i in range(6)]) == expected
        again = worker.pid
        assert again != pid
    other.close()
    assert not Path(f"/proc/{again}").exists()
    with pytest.raises(WorkerUnavailable, match="does not run"):
        other.generate("a")


def test_a_program_that_forgets_to_close_leaves_no_process(mini: Path) -> None:
    code = f"""
from penstock import LLM
llm = LLM({str(mini)!r}, **{SMALL!r})
print(llm._engine._worker.pid, len(llm.generate(["a", "b"])))
"""
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    pid, count = done.stdout.split()
    assert count == "2"
    assert done.stderr == ""
    assert not Path(f"/proc/{pid}").exists()


def test_an_object_that_is_dropped_ends_its_worker(mini: Path) -> None:
    llm = LLM(str(mini), **SMALL)
    worker = llm._engine._worker
    assert worker is not None
    pid = worker.pid
    del llm, worker
    gc.collect()
    assert not Path(f"/proc/{pid}").exists()


def test_what_waits_is_bounded() -> None:
    assert EngineSettings().max_waiting >= engine_module.IN_FLIGHT_MAX
