"""Special tokens in the text of a request never become those tokens: one test per family of templates and
tokenizers.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Library

from penstock.clock import ManualClock
from penstock.errors import InvalidRequest
from penstock.text.chat import ChatTemplate
from penstock.text.prompt import ChatPrompts
from penstock.text.tokenizer import Tokenizer

NONCE = bytes(range(8))
TEXT = [
    'The penstock brings water to a turbine; <b>text</b> in [brackets] & "quotes".\n\n',
    "user assistant system model tool get_weather {'city': 'Zurich'} im_start im_end |> <| [/INST] s>",
    "你好,世界。 naïve 👍 think /think tool_call start_of_turn header_id end eot",
]

CHATML = """{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.role == 'assistant' and '</think>' in m.content %}{{ m.content.split('</think>')[-1].lstrip('\n') }}
{%- elif m.role == 'tool' %}{{ '<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}{{ m.content }}{% endif %}
{%- for call in m.tool_calls or [] %}{{ '<tool_call>' ~ call.function.name ~ (call.function.arguments | \
tojson) ~ '</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}{%- endfor %}{{ '<|im_start|>assistant\n' }}"""
LLAMA3 = """{{ bos_token }}{% for m in messages %}{{ '<|start_header_id|>' + m.role + \
'<|end_header_id|>\n\n' }}
{%- if m.tool_calls %}{{ '{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
{{- m.tool_calls[0].function.arguments | tojson }}{{ '}' }}{% else %}{{ m.content | trim }}{% endif %}{{ \
'<|eot_id|>' }}
{%- endfor %}{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ \
'<|start_header_id|>assistant<|end_header_id|>\n\n' }}"""
MISTRAL = """{{ bos_token }}{% if tools %}{{ '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' \
}}{% endif %}
{%- for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}{{ '[TOOL_CALLS]' + (m.tool_calls \
| tojson) + eos_token }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- elif m.role == 'tool' %}{{ '[TOOL_RESULTS]' ~ m.content ~ '[/TOOL_RESULTS]' }}
{%- else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m.role == 'assistant' \
else m.role) + '\n' }}
{{- m.content | trim }}{% for call in m.tool_calls or [] %}{{ call.function.name }}{{ \
call.function.arguments | string }}{% endfor %}
{{- '<end_of_turn>\n' }}{% endfor %}{% if tools %}{{ tools | string }}{% endif %}{{ '<start_of_turn>model\n' \
}}"""
PHI = """{% for m in messages %}{{ '<|' + m.role + '|>' + '\n' + m.content }}
{%- for call in m.tool_calls or [] %}{{ call | tojson }}{% endfor %}{{ '<|end|>' + '\n' }}{% endfor %}
{%- if tools %}{{ '<|tool|>' + (tools | tojson) + '<|/tool|>' }}{% endif %}{{ '<|assistant|>' + '\n' }}"""
DEEPSEEK = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '<|User|>' + m.content }}
{%- elif m.role == 'assistant' %}{{ '<|Assistant|>' + m.content }}{% for call in m.tool_calls or [] %}{{ \
call | tojson }}{% endfor %}{{ eos_token }}
{%- else %}{{ m.content }}{% endif %}{% endfor %}{% if tools %}{{ tools | tojson(ensure_ascii=True) }}{% \
endif %}{{ '<|Assistant|>' }}"""


SPIECE_DECODER = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


def byte_level() -> Library:
    """As Llama 3, Qwen, Mistral's later ones, Phi and DeepSeek."""
    library = Library(models.BPE())
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, show_progress=False)
    )
    return library


def spiece() -> Library:
    """As Llama 2, Mistral's first ones and Gemma: `▁` for spaces, and the markers are pieces of the model's
    too.
    """
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    names = ["<unk>", "<s>", "</s>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=[*names, *byte_tokens], show_progress=False)
    library.train_from_iterator([line.replace(" ", "▁") for line in TEXT], trainer)
    config = json.loads(library.to_str())
    config["added_tokens"] = config["added_tokens"][:1]
    library = Library.from_str(json.dumps(config))
    library.decoder = SPIECE_DECODER
    return library


def unigram() -> Library:
    """As T5: the model itself would choose a marker's piece for a marker's characters."""
    library = Library(models.Unigram())
    library.pre_tokenizer = pre_tokenizers.Metaspace()
    library.decoder = SPIECE_DECODER
    library.train_from_iterator(
        [*TEXT, *["<|im_start|>"] * 50, *["<|im_end|>"] * 50],
        trainers.UnigramTrainer(
            vocab_size=220, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
    )
    return library


@dataclass(frozen=True)
class Family:
    template: str
    special: tuple[str, ...]
    plain: tuple[str, ...] = ()
    """Added, but not marked as special."""
    text: tuple[str, ...] = ()
    """Of these, those that a message may have, as with the published tokenizers and templates."""
    library: Callable[[], Library] = byte_level
    options: dict[str, bool] = field(default_factory=dict)


FAMILIES = {
    "qwen": Family(
        CHATML,
        ("<|endoftext|>", "<|im_start|>", "<|im_end|>"),
        ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"),
        text=("<think>", "</think>"),
    ),
    "llama3": Family(LLAMA3, ("<|begin|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")),
    "mistral": Family(
        MISTRAL,
        ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
        "[TOOL_RESULTS]",
         "[/TOOL_RESULTS]"),
    ),
    "mistral-spiece": Family(MISTRAL, ("<s>", "</s>", "[INST]", "[/INST]"), library=spiece),
    "gemma": Family(
        GEMMA,
        ("<s>", "</s>", "<start_of_turn>", "<end_of_turn>"),
        ("\n\n", "<b>", "</b>"),
        text=("\n\n", "<b>", "</b>"),
        library=spiece,
    ),
    "phi": Family(
        PHI,
        ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>", "<|/tool|>"),
        options={"rstrip": True},
    ),
    "deepseek": Family(DEEPSEEK, ("<s>", "</s>"), ("<|User|>", "<|Assistant|>")),
    "unigram": Family(CHATML, ("<|im_start|>", "<|im_end|>"), library=unigram),
}  # fmt: skip


class Model:
    """A family's tokenizer and template, as they are loaded."""

    def __init__(self, family: Family, directory: Path) -> None:
        library = family.library()
        library.add_special_tokens(
            [AddedToken(token, special=True, normalized=False, **family.options) for token in family.special]
        )
        library.add_tokens([AddedToken(token, special=False, normalized=False) for token in family.plain])
        library.save(str(directory / "tokenizer.json"))
        known = {"bos_token": family.special[0], "eos_token": family.special[1]}
        (directory / "tokenizer_config.json").write_text(
            json.dumps({"chat_template": family.template, **known})
        )
        self.tokenizer = Tokenizer.load(directory)
        self.template = ChatTemplate.load(directory, wall_ns=ManualClock().wall_ns)
        self.prompts = ChatPrompts(self.template, self.tokenizer, nonce=NONCE)
        markers = [token for token in (*family.special, *family.plain) if token not in family.text]
        ids = {marker: self.tokenizer.token_id(marker) for marker in markers}
        assert None not in ids.values()
        self.markers: dict[str, int] = {marker: i for marker, i in ids.items() if i is not None}

    def counted(self, token_ids: tuple[int, ...]) -> list[int]:
        return [i for i in token_ids if i in self.markers.values()]

    def shown(self, token_ids: tuple[int, ...]) -> str:
        """As text, without spaces: some tokenizers put one behind a special token."""
        return self.tokenizer.decode(token_ids, skip_special_tokens=False).replace(" ", "")

    def theirs(self, messages: list[dict], **options: Any) -> tuple[int, ...]:
        """As Transformers does it: the rendered text as a whole."""
        return self.tokenizer.encode(self.template.render(messages, **options))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(FAMILIES[request.param], tmp_path_factory.mktemp("markers"))


def chat(text: str) -> dict[str, Any]:
    """A conversation with this text wherever a client may put one."""
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": f"f{text}", "arguments": json.dumps({text: [text]})},
    }
    tool = {
        "type": "function",
        "function": {
            "name": "f",
            "description": text,
            "parameters": {"properties": {text: {"enum": [text]}}},
        },
    }
    return {
        "messages": [
            {"role": "system", "content": f"be {text}"},
            {"role": "user", "content": [{"type": "text", "text": text}, {"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "content": f"{text} done", "tool_call_id": text},
            {"role": "user", "content": f"  {text}"},
        ],
        "tools": [tool],
        "extra": {"bos_token": text, "eos_token": text},
    }


def test_no_text_becomes_a_marker(model: Model) -> None:
    harmless = model.counted(model.prompts.token_ids(**chat("xyz")))
    assert len(harmless) >= 4
    for marker in model.markers:
        ids = model.prompts.token_ids(**chat(f"a{marker}\nb"))
        assert model.counted(ids) == harmless
        assert marker in model.shown(ids)
        # Side by side, and one inside another.
        nested = marker[: len(marker) // 2] + marker + marker[len(marker) // 2 :]
        assert model.counted(model.prompts.token_ids(**chat(marker * 3 + nested))) == harmless
    assert model.counted(model.prompts.token_ids(**chat("".join(model.markers)))) == harmless


def test_two_texts_do_not_make_a_marker_together(model: Model) -> None:
    for marker in model.markers:
        for cut in range(1, len(marker)):
            call = {"function": {"name": marker[:cut], "arguments": marker[cut:]}}
            messages = [
                {"role": "user", "content": "hi"},
                {"role": "assistant", "content": "", "tool_calls": [call]},
            ]
            harmless = [
                messages[0],
                messages[1] | {"tool_calls": [{"function": {"name": "f", "arguments": "g"}}]},
            ]
            ids = model.prompts.token_ids(messages)
            assert model.counted(ids) == model.counted(model.prompts.token_ids(harmless))


def test_who_is_trusted_may_write_markers(model: Model) -> None:
    marker = next(iter(model.markers))
    messages = [{"role": "user", "content": f"a {marker} b"}]
    trusted = model.prompts.token_ids(messages, trusted=True)
    assert trusted == model.theirs(messages)
    assert len(model.counted(trusted)) == len(model.counted(model.prompts.token_ids(messages))) + 1


@given(text=st.text(st.sampled_from("ab <|>[]/\n\n▁é你s"), max_size=30))
def test_other_texts_have_the_ids_that_they_always_had(model: Model, text: str) -> None:
    if any(marker in text for marker in model.markers):
        return
    for messages in ([{"role": "user", "content": text}], chat(text)["messages"]):
        try:
            theirs = model.theirs(messages)
        except InvalidRequest:
            continue
        if len(model.counted(theirs)) == len(
            model.counted(model.theirs([m | {"content": "x"} for m in messages]))
        ):
            assert model.prompts.token_ids(messages) == theirs


def test_a_marker_leaves_the_ids_of_what_stands_around_it_alone(model: Model) -> None:
    """The text in front of it and behind it is tokenized as it is beside other plain text."""
    marker = max(model.markers, key=len)
    before, behind = "The turbine, naïve: ", " brings water to a penstock."
    ids = model.prompts.token_ids([{"role": "user", "content": before + marker + behind}])
    plain = model.theirs([{"role": "user", "content": before + "<%>" + behind}])
    start = next(i for i, (a, b) in enumerate(zip(ids, plain, strict=False)) if a != b)
    assert ids[:start] == plain[:start]
    assert start > 4
    assert ids[-4:] == plain[-4:]
    assert (marker + behind).replace(" ", "") in model.shown(ids)


def test_what_a_template_takes_out_of_messages_itself_stays_as_it_is(tmp_path: Path) -> None:
    model = Model(FAMILIES["qwen"], tmp_path)
    messages = [
        {"role": "user", "content": "hi <think>"},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello"},
    ]
    ids = model.prompts.token_ids(messages)
    assert ids == model.theirs(messages)
    assert "hm" not in model.tokenizer.decode(ids)


def test_private_characters_of_a_message_stay_text(model: Model) -> None:
    marker = next(iter(model.markers))
    text = f"{marker} \U00100000\U00100001 \U000f0000\U000f0001"
    ids = model.prompts.token_ids([{"role": "user", "content": text}])
    assert len(model.counted(ids)) == len(model.counted(model.theirs([{"role": "user", "content": "x"}])))
    if model.tokenizer.token_id("<unk>") is None:
        assert text.replace(" ", "") in model.shown(ids)


def test_a_chat_that_nests_too_deeply_is_refused(model: Model) -> None:
    deep = '{"a":' * 900 + "1" + "}" * 900
    call = {"function": {"name": "f", "arguments": deep}}
    with suppress(InvalidRequest):  # Some templates do not write them.
        model.prompts.token_ids([{"role": "assistant", "content": "", "tool_calls": [call]}])


@pytest.mark.parametrize("said", ["It has four ", "a <|im_end|> b", "<|im"])
def test_a_prompt_may_end_within_its_last_message(model: Model, said: str) -> None:
    messages = [{"role": "user", "content": "How many?"}, {"role": "assistant", "content": said}]
    whole = model.tokenizer.decode(model.prompts.token_ids(messages), skip_special_tokens=False)
    ids = model.prompts.token_ids(messages, add_generation_prompt=False, continues=True)
    begun = model.tokenizer.decode(ids, skip_special_tokens=False)
    assert whole.startswith(begun)
    assert begun.rstrip().endswith(said.rstrip())
    trims = "| trim" in model.template.sources["default"]
    assert begun.endswith(said.rstrip() if trims else said)
    assert model.prompts.token_ids(messages, continues=True, trusted=True)


def test_a_last_message_that_is_not_shown_cannot_be_continued(model: Model) -> None:
    for last in ({"role": "assistant", "content": ""}, {"role": "assistant", "content": None}):
        with pytest.raises(InvalidRequest) as caught:
            model.prompts.token_ids([{"role": "user", "content": "a"}, last], continues=True)
        assert caught.value.param == "continue_final_message"
