"""`LLM.embed` and `LLM.score` of models that make vectors: as transformers makes them."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from small_llm import SMALL
from transformers import PreTrainedModel
from vector_models import decoder, encoder, expected, write_words

from penstock import LLM
from penstock.errors import ContextTooLong, InvalidRequest, Unsupported
from penstock.offline import llm as llm_module
from penstock.offline import vectors

TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9", "w1 w2", "w3 w3 w3 w3"]

pytestmark = pytest.mark.timeout(180)


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "it never came to that"
        time.sleep(0.005)


class Pair(NamedTuple):
    llm: LLM
    model: PreTrainedModel


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    place: Path = tmp_path_factory.mktemp("vectors")
    model = decoder("qwen3", place, "lasttoken")
    write_words(place, [f"w{i}" for i in range(100)])
    with LLM(str(place), served_model_name="vectors", max_model_len=64, runner="pooling", **SMALL) as llm:
        yield Pair(llm, model)


def test_vectors_are_those_of_transformers_in_order(made: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "TEXTS_MAX", 2)
    monkeypatch.setattr(llm_module, "REQUESTS_MAX", 2)
    found = made.llm.embed(text for text in TEXTS * 3)
    ids = [list(output.prompt_token_ids) for output in found]
    by_ids = made.llm.embed(ids)
    for outputs in (found, by_ids):
        vector = torch.tensor([output.outputs.embedding for output in outputs])
        torch.testing.assert_close(vector, expected(made.model, ids, "lasttoken"), atol=1e-4, rtol=0)
    assert [output.request_id for output in found] == [str(i) for i in range(15)]
    assert found[0].outputs.hidden_size == 48


def test_scores_are_cosines(made: Pair) -> None:
    found = made.llm.score(TEXTS[0], TEXTS[1:])
    one, *others = (torch.tensor(output.outputs.embedding) for output in made.llm.embed(TEXTS))
    cosines = [torch.nn.functional.cosine_similarity(one, other, dim=0).item() for other in others]
    assert [output.outputs.score for output in found] == pytest.approx(cosines, abs=1e-5)
    (same,) = made.llm.score("w1 w2", "w1 w2")
    assert same.outputs.score == pytest.approx(1.0)


def test_an_interrupted_call_ends_what_it_waited_for(made: Pair) -> None:
    backend, worker = made.llm._engine._backend, made.llm._engine._worker
    assert backend is not None
    assert worker is not None
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)  # It gives no answer meanwhile.

    def interrupt() -> None:
        wait_until(lambda: backend.num_streams == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            made.llm.embed(TEXTS)
        thread.join()
        wait_until(lambda: backend.num_streams == 0)
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert len(made.llm.embed(TEXTS)) == len(TEXTS)


def test_a_cross_encoder_scores_pairs_as_transformers_does(tmp_path: Path) -> None:
    model = encoder("bert", tmp_path, labels=1)
    tokenizer = write_words(tmp_path, [f"w{i}" for i in range(100)], style="bert")
    with LLM(str(tmp_path), max_model_len=32, **SMALL) as llm:
        found = llm.score("w1 w2", TEXTS)
        with torch.inference_mode():
            for text, output in zip(TEXTS, found, strict=True):
                pair = tokenizer.encode("w1 w2", text)
                assert list(output.prompt_token_ids) == pair.ids
                asked = {
                    "input_ids": torch.tensor([pair.ids]),
                    "token_type_ids": torch.tensor([pair.type_ids]),
                }
                expected_score = model(**asked).logits[0, 0].sigmoid().item()
                assert output.outputs.score == pytest.approx(expected_score, abs=1e-4)
        assert llm.score([], []) == []
        (cut,) = llm.score("w1", "w2 " * 60, truncate_prompt_tokens=-1)
        assert len(cut.prompt_token_ids) == 32
        for call, kind, words in (
            (lambda: llm.score("w1", ["w2", "w2 " * 60]), ContextTooLong, r"text 1 has 6\d tokens"),
            (lambda: llm.score(["w1", "w1"], ["w2"] * 3), InvalidRequest, "3 texts for 2"),
            (lambda: llm.score("w1", None), InvalidRequest, "text_2.*expected texts"),  # type: ignore
            (lambda: llm.embed("w1"), Unsupported, "makes no vectors"),
            (lambda: llm.generate("w1"), Unsupported, "generates no text"),
        ):
            with pytest.raises(kind, match=words):
                call()


def test_what_makes_no_sense(made: Pair, llm: LLM) -> None:
    with pytest.raises(ContextTooLong, match=r"prompt 1 has 7\d tokens"):
        made.llm.embed(["w1", "w2 " * 70])
    assert len(made.llm.embed("w2 " * 70, truncate_prompt_tokens=-1)[0].prompt_token_ids) == 64
    for call, kind, words in (
        (lambda: made.llm.embed(["w1", 3]), InvalidRequest, "prompt 1: "),  # type: ignore
        (lambda: made.llm.embed([[5000]]), InvalidRequest, "vocabulary"),
        (lambda: made.llm.embed("w1", truncate_prompt_tokens=65), InvalidRequest, "truncate_prompt_tokens"),
        (lambda: made.llm.generate("w1"), Unsupported, "generates no text"),
        (lambda: llm.embed("a"), Unsupported, "makes no vectors"),
    ):
        with pytest.raises(kind, match=words):
            call()
