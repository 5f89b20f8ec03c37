"""A model's small files: those in its directory, or, of a GGUF file, what they would be.

A model is a path, a directory or a GGUF file, everywhere behind `config/checkpoints.py`. So `read_file` of
`model.gguf/tokenizer.json` is made of the file's keys:

    tokenizer.ggml.model   gpt2: BPE over bytes, split by the rule that `tokenizer.ggml.pre` names
                           llama: SentencePiece, which merges the pair of the highest score first
    token_type             1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 one byte

The rules by name are those of llama.cpp's `src/llama-vocab.cpp`, in the form in which the models' authors
publish them. No key says which tokens end an answer beside EOS; llama.cpp knows them by their text, and so do
we.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from penstock.errors import CheckpointError
from penstock.models.config import CONFIG_FILE, SIZES_MAX, HfConfig, read_config_file
from penstock.models.gguf_config import Gguf, gguf_architecture, gguf_config, read_gguf

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
_NORMAL = 1
_SPACE = "▁"
MERGE_WORK_MAX = 1 << 30
"""Characters that looking for the merges of a SentencePiece vocabulary may copy; Gemma's take 2^24."""

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_REST_WITH_SLASH = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{{1,3}}{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|{_BEFORE}\p{{L}}+|\p{{N}}{_REST}"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_REST_WITH_SLASH}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}{_REST_WITH_SLASH}"
)
_SPLITS: dict[tuple[str, ...], tuple[str, ...]] = {
    ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "olmo", "mpt", "exaone4", "trillion"): (_GPT2,),
    ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"): (r"\p{N}", _GPT2),
    ("llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "dbrx", "smaug-bpe"): (_LLAMA3,),
    ("qwen2", "deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan"): (_QWEN2,),
    ("tekken",): (_TEKKEN,),
    ("gpt-4o", "llama4", "kanana2"): (_GPT4O,),
}
SPLITS = {name: rules for names, rules in _SPLITS.items() for name in names}
"""The rules that cut text, one after the other, by `tokenizer.ggml.pre`."""
_WHOLE_WORDS = {"llama3", "llama-v3", "llama-bpe", "falcon3", "pixtral", "midm-2.0", "tekken"}
"""A word that is a token needs no merges that lead to it."""
_BEGIN_BY_DEFAULT = _WHOLE_WORDS
"""BOS comes first unless a key says otherwise."""
_NORMALISED = {"qwen2", "deepseek-r1-qwen", "megrez"}
"""To NFC, as their authors' tokenizers do; llama.cpp leaves it out."""
ENDS = (
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>",
    "<|eom_id|>", "<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>", "<eos>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
"""Tokens that end an answer, whatever the keys say of them."""
_SPECIAL = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
_SAMPLING = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}  # fmt: skip


class GgufVocabulary:
    """The tokens of a file, read once for whatever is made of them.

    Raises:
        CheckpointError: there is no vocabulary, or it is of a kind that is not read, by the key's name.
    """

    def __init__(self, gguf: Gguf) -> None:
        self._file, self._architecture = gguf.first, gguf_architecture(gguf)
        self._kind = self._file.text("tokenizer.ggml.model", "none")
        if self._kind not in ("gpt2", "llama"):
            raise self._error("model", f"is {self._kind!r}, which is not read; expected 'gpt2' or 'llama'")
        count = self._file.count("tokenizer.ggml.tokens") or 0
        if not 0 < count <= SIZES_MAX["vocab_size"]:
            raise self._error("tokens", f"has {count} entries; expected 1 to {SIZES_MAX['vocab_size']}")
        self.tokens = self._file.strings("tokenizer.ggml.tokens") or []
        types = self._per_token("token_type")
        self._types: Sequence[int] = types or (_NORMAL,) * count
        if self._kind == "gpt2":
            self._pre = self._file.text("tokenizer.ggml.pre", "none") or ""
            if self._pre not in SPLITS:
                raise self._error("pre", f"is {self._pre!r}; expected one of {', '.join(sorted(SPLITS))}")

    def tokenizer(self) -> dict[str, Any]:
        """The content of `tokenizer.json`."""
        parts = self._bytes_bpe() if self._kind == "gpt2" else self._sentencepiece()
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": self._added(),
            "post_processor": self._around(),
            **parts,
        }

    def config(self) -> dict[str, Any]:
        """The content of `tokenizer_config.json`."""
        found: dict[str, Any] = {}
        for name, field in _SPECIAL.items():
            if (token_id := self.token_id(name)) is not None:
                found[field] = self.tokens[token_id]
        names = [("default", "tokenizer.chat_template")]
        names += [
            (name, f"tokenizer.chat_template.{name}")
            for name in self._file.strings("tokenizer.chat_templates") or ()
        ]
        templates = {name: self._file.text(key) for name, key in names}
        found["chat_template"] = [
            {"name": name, "template": text} for name, text in templates.items() if text
        ]
        return found

    def generation(self) -> dict[str, Any]:
        """The content of `generation_config.json`."""
        ends = [self.token_id(name) for name in ("eos", "eot", "eom")]
        known = set(ENDS)
        ends += [i for i, token in enumerate(self.tokens) if token in known]
        found: dict[str, Any] = {
            "eos_token_id": list(dict.fromkeys(token_id for token_id in ends if token_id is not None))
        }
        for key, field in _SAMPLING.items():
            if (number := self._file.number(f"general.sampling.{key}")) is not None:
                found[field] = int(number) if field == "top_k" else number
        return found

    def token_id(self, name: str) -> int | None:
        """A token that a key names by its number; None: the file names none.

        Raises:
            CheckpointError: there is no such token.
        """
        found = self._file.integer(f"tokenizer.ggml.{name}_token_id")
        if found is not None and not 0 <= found < len(self.tokens):
            raise self._error(
                f"{name}_token_id", f"is {found}; expected one of the {len(self.tokens)} tokens"
            )
        return found

    def _per_token(self, key: str) -> tuple[Any, ...] | None:
        count = self._file.count(f"tokenizer.ggml.{key}")
        if count is not None and count != len(self.tokens):
            raise self._error(key, f"has {count} entries; expected one for each of {len(self.tokens)} tokens")
        return self._file.numbers(f"tokenizer.ggml.{key}")

    def _ids(self) -> dict[str, int]:
        """By token; the first where two are the same."""
        found: dict[str, int] = {}
        for i, token in enumerate(self.tokens):
            found.setdefault(token, i)
        return found

    def _bytes_bpe(self) -> dict[str, Any]:
        ids, merges = self._ids(), self._file.strings("tokenizer.ggml.merges")
        if merges is None:
            raise self._error("merges", "is missing; expected pairs of tokens")
        pairs = [merge.split(" ") for merge in merges]
        for pair in pairs:
            if len(pair) != 2 or pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
                raise self._error("merges", f"has {' '.join(pair)[:64]!r}; expected two tokens that make one")
        rules = [
            {"type": "Split", "pattern": {"Regex": rule}, "behavior": "Isolated", "invert": False}
            for rule in SPLITS[self._pre]
        ]
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        if self._file.flag("tokenizer.ggml.add_space_prefix", default=False):
            level["add_prefix_space"] = True
        return {
            "normalizer": {"type": "NFC"} if self._pre in _NORMALISED else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*rules, level]},
            "decoder": {
                "type": "ByteLevel",
                "add_prefix_space": False,
                "trim_offsets": True,
                "use_regex": True,
            },
            "model": _bpe(ids, pairs) | {"ignore_merges": self._pre in _WHOLE_WORDS},
        }

    def _sentencepiece(self) -> dict[str, Any]:
        ids, prefix = self._ids(), self._file.flag("tokenizer.ggml.add_space_prefix", default=True)
        unknown = self.token_id("unknown")
        escape = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
        steps: list[dict[str, Any]] = [
            {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if prefix:
            steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        before = [{"type": "Prepend", "prepend": _SPACE}] if prefix else []
        model = _bpe(ids, self._score_merges(ids)) | {
            "byte_fallback": True,
            "fuse_unk": True,
            "unk_token": None if unknown is None else self.tokens[unknown],
        }
        return {
            "normalizer": {"type": "Sequence", "normalizers": [*before, escape]},
            "pre_tokenizer": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": model,
        }

    def _score_merges(self, ids: dict[str, int]) -> list[tuple[str, str]]:
        """Every pair of tokens that makes a third, in the order in which SentencePiece would join them."""
        scores = self._per_token("scores")
        if scores is None:
            raise self._error("scores", "is missing; expected one for each token")
        joined = [i for i, kind in enumerate(self._types) if kind in (_NORMAL, USER_DEFINED)]
        if sum(len(self.tokens[i]) ** 2 for i in joined) > MERGE_WORK_MAX:
            raise self._error("tokens", "are too long for a SentencePiece vocabulary")
        joined.sort(key=lambda i: (-scores[i], i))
        found: list[tuple[str, str]] = []
        for i in joined:
            token = self.tokens[i]
            if ids[token] != i:
                continue
            pairs = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
            pairs = [pair for pair in pairs if pair[0] in ids and pair[1] in ids]
            found += sorted(pairs, key=lambda pair: (ids[pair[0]], ids[pair[1]]))
        return found

    def _added(self) -> list[dict[str, Any]]:
        """Tokens that text is searched for before anything else."""
        ends, name = set(ENDS), (self._file.text("general.name", "") or "").lower()
        swallows = self._kind == "llama" and ("phi-3" in name or "phi3" in name)
        found: list[dict[str, Any]] = []
        for i, (token, kind) in enumerate(zip(self.tokens, self._types, strict=True)):
            special = kind in (CONTROL, UNKNOWN) or token in ends
            if not token or not (special or kind == USER_DEFINED):
                continue
            rstrip = swallows and special and token not in ("<unk>", "<s>", "<|endoftext|>")
            found.append(
                {
                    "id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": rstrip,
                    "normalized": False, "special": special,
                }
            )  # fmt: skip
        return found

    def _around(self) -> dict[str, Any] | None:
        """The tokens before and after a text that asks for special tokens."""
        begins = self._kind == "llama" or self._pre in _BEGIN_BY_DEFAULT
        sides = [
            self.token_id("bos") if self._file.flag("tokenizer.ggml.add_bos_token", begins) else None,
            self.token_id("eos") if self._file.flag("tokenizer.ggml.add_eos_token", default=False) else None,
        ]
        if sides == [None, None]:
            return None
        before, after = (
            [] if i is None else [{"SpecialToken": {"id": self.tokens[i], "type_id": 0}}] for i in sides
        )
        text = {"Sequence": {"id": "A", "type_id": 0}}
        return {
            "type": "TemplateProcessing",
            "single": [*before, text, *after],
            "pair": [*before, text, *after, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {
                self.tokens[i]: {"id": self.tokens[i], "ids": [i], "tokens": [self.tokens[i]]}
                for i in sides
                if i is not None
            },
        }

    def _error(self, key: str, said: str) -> CheckpointError:
        return CheckpointError(f"{self._file.path}: tokenizer.ggml.{key} {said}")


def _bpe(ids: dict[str, int], merges: Sequence[Sequence[str]]) -> dict[str, Any]:
    return {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": ids, "merges": merges,
    }  # fmt: skip


_MADE: dict[str, Callable[[GgufVocabulary], dict[str, Any]]] = {
    "tokenizer.json": GgufVocabulary.tokenizer,
    "tokenizer_config.json": GgufVocabulary.config,
    "generation_config.json": GgufVocabulary.generation,
}


def is_gguf(model: Path) -> bool:
    """Whether a model is a GGUF file: the only kind that is no directory."""
    return model.is_file()


def has_file(path: Path) -> bool:
    """Whether the model `path.parent` has a file `path.name`."""
    return path.name in _MADE if is_gguf(path.parent) else path.exists()


def read_file(path: Path, bytes_max: int) -> bytes:
    """The file `path.name` of the model `path.parent`.

    Raises:
        CheckpointError: it is missing, unreadable or larger than `bytes_max`.
    """
    if is_gguf(path.parent):
        return _made(path.parent, path.name)
    try:
        size = path.stat().st_size
        if size > bytes_max:
            raise CheckpointError(f"{path}: {size} bytes is over the bound of {bytes_max}")
        return path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error


def read_config(model: Path) -> HfConfig:
    """The configuration of a model.

    Raises:
        CheckpointError: there is no such model or file, or a field has the wrong type or an absurd size.
    """
    return gguf_config(read_gguf(model)) if is_gguf(model) else read_config_file(model / CONFIG_FILE)


def changed_ns(model: Path) -> int:
    """When the model was last changed."""
    return (model if is_gguf(model) else model / CONFIG_FILE).stat().st_mtime_ns


def _made(model: Path, name: str) -> bytes:
    make = _MADE.get(name)
    if make is None:
        raise CheckpointError(f"{model}: a GGUF file has no {name}")
    found = model.stat()
    return msgspec.json.encode(make(_vocabulary(model, found.st_size, found.st_mtime_ns, found.st_ino)))


@lru_cache(maxsize=1)
def _vocabulary(model: Path, _size: int, _mtime_ns: int, _inode: int) -> GgufVocabulary:
    """Its files are read one after the other."""
    return GgufVocabulary(read_gguf(model))
