"""The vocabulary that is read while a model is loaded: the same as one that is read after it."""

import json
import shutil

import pytest

from penstock.config.checkpoints import resolve
from penstock.engine.grammar.compiler import GrammarTokens
from penstock.engine.grammar.vocabulary import begin_vocabulary
from penstock.models.registry import read_spec


@pytest.fixture
def model(tmp_path):
    """A copy of the smallest demo model's directory, without its weights."""
    shutil.copytree(
        resolve("penstock-demo-mini"), tmp_path / "m", ignore=shutil.ignore_patterns("*.safetensors")
    )
    return tmp_path / "m"


def test_it_is_the_one_that_would_be_read_after(model):
    vocabulary = begin_vocabulary(model)
    size = read_spec(model)[0].vocab_size
    read, after = vocabulary.tokens(), GrammarTokens.load(model, size)
    assert (read.vocab_size, read.eos_ids) == (after.vocab_size, after.eos_ids)
    ids = list(range(size))
    assert read.library.decode_bytes(ids) == after.library.decode_bytes(ids)


def test_without_a_tokenizer_or_a_config_none_is_begun(model):
    (model / "tokenizer.json").unlink()
    assert begin_vocabulary(model) is None
    (model / "config.json").unlink()
    assert begin_vocabulary(model) is None


def test_a_tokenizer_that_cannot_be_read_means_no_grammars(model):
    (model / "tokenizer.json").write_text("[]")
    assert begin_vocabulary(model).tokens() is None


def test_what_fails_in_its_thread_fails_in_who_asks(model, monkeypatch):
    def fails(model_dir, vocab_size):
        raise RuntimeError("broken")

    monkeypatch.setattr(GrammarTokens, "load", fails)
    with pytest.raises(RuntimeError, match="broken"):
        begin_vocabulary(model).tokens()


def test_a_model_that_embeds_has_no_use_for_one(model):
    config = json.loads((model / "config.json").read_text())
    spec, _ = read_spec(model)
    assert not spec.embeds
    encoder = config | {"is_causal": False, "architectures": ["Qwen2Model"]}
    (model / "config.json").write_text(json.dumps(encoder))
    assert begin_vocabulary(model) is None
