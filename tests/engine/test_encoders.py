"""An encoder's vectors and scores are those of transformers, alone and in any batch."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import VOCAB_SIZE
from vector_driver import VectorDriver
from vector_models import encoder, expected, write_modules

from penstock.errors import CheckpointError, ConfigError
from penstock.rng import stream

LENGTHS = (1, 2, 40, 17, 40, 130, 17)


def texts(longest: int = 130) -> list[list[int]]:
    random = stream(5, "texts")
    return [[random.randrange(4, VOCAB_SIZE) for _ in range(min(length, longest))] for length in LENGTHS]


@pytest.mark.parametrize("family", ["bert", "roberta"])
@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_vectors(tmp_path: Path, family: str, pooling: str) -> None:
    model = encoder(family, tmp_path)
    write_modules(tmp_path, pooling)
    right = expected(model, texts(), pooling)
    whole = VectorDriver(tmp_path, kernels="auto")
    (reported,) = whole.ask(texts())
    torch.testing.assert_close(reported.rows, right, atol=1e-5, rtol=0)
    # Chunks of a text are planned over several steps, and computed with the last.
    (cut,) = VectorDriver(tmp_path, kernels="auto", step_tokens=16, max_running=4).ask(texts())
    torch.testing.assert_close(cut.rows, reported.rows, atol=1e-6, rtol=0)
    for i, text in enumerate(texts()):
        (alone,) = whole.ask([text])
        torch.testing.assert_close(alone.rows[0], reported.rows[i], atol=1e-6, rtol=0)
    assert whole.core.stats().blocks_used == 0


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_scores_of_pairs(tmp_path: Path, family: str) -> None:
    model = encoder(family, tmp_path, labels=1)
    pairs, firsts = texts(), [0, 1, 7, 16, 39, 60, 5]
    (reported,) = [VectorDriver(tmp_path, kernels="auto")]
    name = reported.submit(pairs, firsts=tuple(firsts))
    reported.run()
    for i, (pair, first) in enumerate(zip(pairs, firsts, strict=True)):
        types = (
            [0] * len(pair) if family == "roberta" or not first else [0] * first + [1] * (len(pair) - first)
        )
        with torch.inference_mode():
            logits = model(torch.tensor([pair]), token_type_ids=torch.tensor([types])).logits[0]
        torch.testing.assert_close(reported.reported[name].rows[i], torch.sigmoid(logits), atol=1e-5, rtol=0)
    info = reported.runner.info
    assert (info.pooling, info.vector_size, info.capabilities) == ("scores", 1, frozenset({"scores"}))


def test_bare_encoders_take_the_first_token(tmp_path: Path) -> None:
    model = encoder("roberta", tmp_path)
    driver = VectorDriver(tmp_path, kernels="auto")
    (reported,) = driver.ask(texts())
    torch.testing.assert_close(reported.rows, expected(model, texts(), "cls"), atol=1e-5, rtol=0)
    assert driver.runner.info.max_model_len == 198  # Two rows of the table are before the first token's.


WRONG = {
    "labels": ({"id2label": {"0": "a", "1": "b"}}, "has 2 labels; expected one"),
    "activation": ({"hidden_act": "silu"}, "hidden_act 'silu'"),
    "positions": ({"position_embedding_type": "relative_key"}, "position_embedding_type"),
    "decoder": ({"is_decoder": True}, "is_decoder is true"),
    "heads": ({"num_attention_heads": 5}, "not a multiple of num_attention_heads"),
    "size": ({"hidden_size": 96}, "has shape"),
    "layers": ({"num_hidden_layers": 9}, "tensor encoder.layer.3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_configs_that_are_not_supported(tmp_path: Path, name: str) -> None:
    changes, words = WRONG[name]
    encoder("bert", tmp_path, labels=1)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(CheckpointError, match=words):
        VectorDriver(tmp_path, kernels="auto")


def test_settings_that_make_no_sense(tmp_path: Path) -> None:
    encoder("bert", tmp_path)
    for settings in ({"kernels": "native"}, {"quantization": "int8"}, {"max_model_len": 201}):
        with pytest.raises(ConfigError, match=r"engine\."):
            VectorDriver(tmp_path, **{"kernels": "auto"} | settings)
