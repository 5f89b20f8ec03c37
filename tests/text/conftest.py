"""Small real tokenizers, one per family of decoders."""

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from penstock.text.tokenizer import Tokenizer

CORPUS = [
    "A penstock is the pipe and gate that bring water to a turbine at just the rate it can use.",
    "the quick brown fox jumps over the lazy dog, and then the dog jumps over the fox",
    "你好,世界。今天天气很好,我们去公园散步吧。" * 3,
    "def f(x):\n    return {'a': x, \"b\": [1, 2, 3]}\n\n\n",
    "naïve café über straße 👩‍👩‍👧‍👦 👍🏽 🇨🇭 e\u0301 n\u0303 ｶﾞ",
    "  two  spaces   three\tand tabs\t\t",
]


def write(model_dir: Path, library: Library, **configs: dict) -> Path:
    model_dir.mkdir(parents=True, exist_ok=True)
    library.save(str(model_dir / "tokenizer.json"))
    for name, config in configs.items():
        (model_dir / f"{name}.json").write_text(json.dumps(config))
    return model_dir


@pytest.fixture(scope="session")
def byte_level_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens([AddedToken("<tool_call>", special=False), AddedToken("ein Wort", special=False)])
    library.enable_truncation(8)  # Left over from training, as in some checkpoints.
    return write(
        tmp_path_factory.mktemp("byte-level"),
        library,
        tokenizer_config={"eos_token": "<|im_end|>", "bos_token": None},
        generation_config={"eos_token_id": [2, 0], "temperature": 0.7, "top_k": 20, "top_p": 0.8},
        config={"eos_token_id": 1},
    )


@pytest.fixture(scope="session")
def spiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As Llama 2: BPE with byte fallback, `▁` for spaces, BOS from the post-processor."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *byte_tokens], show_progress=False
    )
    library.train_from_iterator([line.replace(" ", "▁") for line in CORPUS if line.isascii()], trainer)
    config = json.loads(library.to_str())
    config["added_tokens"] = config["added_tokens"][:3]  # Byte tokens are not special.
    library = Library.from_str(json.dumps(config))
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return write(
        tmp_path_factory.mktemp("spiece"),
        library,
        tokenizer_config={"eos_token": {"__type": "AddedToken", "content": "</s>"}, "bos_token": "<s>"},
    )


@pytest.fixture(scope="session")
def metaspace_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As T5: Unigram with the Metaspace decoder, which treats the first token apart."""
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    return write(tmp_path_factory.mktemp("metaspace"), library)


@pytest.fixture(scope="session")
def byte_level(byte_level_dir: Path) -> Tokenizer:
    return Tokenizer.load(byte_level_dir)


@pytest.fixture(scope="session")
def spiece(spiece_dir: Path) -> Tokenizer:
    return Tokenizer.load(spiece_dir)


@pytest.fixture(scope="session")
def metaspace(metaspace_dir: Path) -> Tokenizer:
    return Tokenizer.load(metaspace_dir)
