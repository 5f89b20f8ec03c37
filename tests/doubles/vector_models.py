"""Small models that make vectors, in the layouts in which people publish them, and what transformers and
sentence-transformers make of the same texts.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import torch
from tiny_models import VOCAB_SIZE, save, tiny_model
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedModel,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
    XLMRobertaModel,
)


def write_modules(
    directory: Path, pooling: str, *, normalise: bool = True, tokens_max: int = 0, flags: bool = True
) -> None:
    """The files of sentence-transformers beside a model. `flags`: as its older versions wrote the pooling."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if normalise else [])]
    places = ["", "1_Pooling", "2_Normalize"]
    modules = [
        {"idx": i, "name": str(i), "path": places[i], "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    (directory / "1_Pooling").mkdir()
    names = {"cls": "cls_token", "mean": "mean_tokens", "lasttoken": "lasttoken", "max": "max_tokens"}
    file = {f"pooling_mode_{name}": kind == pooling for kind, name in names.items()}
    (directory / "1_Pooling/config.json").write_text(json.dumps(file if flags else {"pooling_mode": pooling}))
    if tokens_max:
        (directory / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": tokens_max}))


def decoder(family: str, directory: Path, pooling: str, **changes: object) -> PreTrainedModel:
    """A decoder of the family in `directory`, with the files of sentence-transformers; the model itself."""
    model = tiny_model(family, **changes)
    save(model, directory)
    write_modules(directory, pooling)
    return model


@torch.inference_mode()
def expected(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], pooling: str, *, normalise: bool = True
) -> torch.Tensor:
    """`[num_texts, hidden_size]`, each text computed alone by transformers."""
    inner = getattr(model, "model", model)
    inner = getattr(inner, "language_model", inner)
    rows: list[torch.Tensor] = []
    for text in texts:
        (hidden,) = inner(torch.tensor([list(text)])).last_hidden_state
        rows.append({"cls": hidden[0], "lasttoken": hidden[-1], "mean": hidden.mean(0)}[pooling])
    found = torch.stack(rows).float()
    return torch.nn.functional.normalize(found) if normalise else found


def write_words(directory: Path, words: Sequence[str], *, style: str = "eos") -> tokenizers.Tokenizer:
    """A tokenizer of whole words beside a model: "eos" puts `<eos>` behind a text, as Qwen3's embedding
    models do; "bert" and "roberta" put their marks around texts and between pairs.
    """
    marks = {
        "eos": ["<unk>", "<eos>"],
        "bert": ["[PAD]", "[UNK]", "[CLS]", "[SEP]"],
        "roberta": ["<s>", "<pad>", "</s>", "<unk>"],
    }[style]
    vocab = {word: i for i, word in enumerate([*marks, *words])}
    unknown = next(mark for mark in marks if "unk" in mark.lower())
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token=unknown))
    library.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    single, pair, used = {
        "eos": ("$A <eos>", None, ["<eos>"]),
        "bert": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1", ["[CLS]", "[SEP]"]),
        "roberta": ("<s> $A </s>", "<s> $A </s> </s> $B </s>", ["<s>", "</s>"]),
    }[style]
    library.post_processor = tokenizers.processors.TemplateProcessing(
        single=single, pair=pair, special_tokens=[(mark, vocab[mark]) for mark in used]
    )
    library.add_special_tokens(marks)
    library.save(str(directory / "tokenizer.json"))
    return library


def encoder(family: str, directory: Path, *, labels: int = 0, **changes: object) -> PreTrainedModel:
    """A small BERT ("bert") or XLM-RoBERTa ("roberta"); with `labels`, one with a head."""
    config_class, plain, headed = {
        "bert": (BertConfig, BertModel, BertForSequenceClassification),
        "roberta": (XLMRobertaConfig, XLMRobertaModel, XLMRobertaForSequenceClassification),
    }[family]
    settings: dict[str, object] = {
        "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3,
        "num_attention_heads": 6, "max_position_embeddings": 200, "initializer_range": 0.1,
    }  # fmt: skip
    settings |= {"type_vocab_size": 2} if family == "bert" else {"type_vocab_size": 1, "pad_token_id": 1}
    if labels:
        settings["num_labels"] = labels
    torch.manual_seed(1234)
    model = (headed if labels else plain)(config_class(**settings | changes)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return save(model, directory) and model
