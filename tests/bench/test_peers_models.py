"""The model directories that the engines are compared on."""

import json
from dataclasses import replace

import pytest
import tokenizers
from known_shapes import SHAPES, make_model
from word_vocabulary import SPECIAL, make_vocabulary, save_tokenizer

from penstock.bench.prompts import WORDS
from penstock.models.registry import read_spec


@pytest.mark.parametrize(("name", "parameters"), [("28m", 28_058_112), ("494m", 494_032_768)])
def test_shapes_have_as_many_parameters_as_they_say(name, parameters):
    assert SHAPES[name].parameters == parameters


def test_the_vocabulary_has_exactly_the_size_that_was_asked_for_and_no_token_twice():
    for size in (1200, 16_384, 151_936):
        vocabulary = make_vocabulary(size)
        assert len(vocabulary.tokens) == len(set(vocabulary.tokens)) == size
        assert len(vocabulary.merges) == size - 256 - len(SPECIAL)


@pytest.mark.parametrize("size", [100, 10_000_000])
def test_a_vocabulary_that_cannot_be_made_is_refused(size):
    with pytest.raises(ValueError, match=str(size)):
        make_vocabulary(size)


def test_common_words_are_one_token_and_any_text_goes_through_and_back(tmp_path):
    save_tokenizer(make_vocabulary(16_384), tmp_path, context=64)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    text = "7 c8 " + " ".join(WORDS)
    ids = library.encode(text, add_special_tokens=False).ids
    assert len(ids) == len(WORDS) + 3
    for sample in (text, "Grüße, 世界! \t\n", "unseenwords"):
        assert library.decode(library.encode(sample).ids, skip_special_tokens=False) == sample


def test_special_tokens_are_found_whole_and_counted_as_unreadable(tmp_path):
    vocabulary = make_vocabulary(1200)
    save_tokenizer(vocabulary, tmp_path, context=64)
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert library.encode("<|im_start|>user<|im_end|>").ids[0] == 1
    assert set(range(len(SPECIAL))) < set(vocabulary.unreadable)
    assert all(library.decode([one], skip_special_tokens=True).isascii() for one in range(259, 1200))
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["eos_token"] == "<|im_end|>"


@pytest.mark.parametrize("name", ["28m", "494m"])
def test_our_engine_reads_the_directory_and_it_is_made_once(tmp_path, name):
    shape = replace(SHAPES[name], layers=1, vocab=1200)
    folder = make_model(shape, tmp_path / name)
    spec, _ = read_spec(folder)
    assert (spec.hidden_size, spec.vocab_size) == (shape.hidden, shape.vocab)
    made_at = (folder / "model.safetensors").stat().st_mtime_ns
    assert make_model(shape, folder) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == made_at
