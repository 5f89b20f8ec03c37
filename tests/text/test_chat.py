import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from penstock.clock import ManualClock
from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.chat import ChatTemplate

CLOCK = ManualClock()

CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%d %b %Y") %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\nToday Date: " + date_string + "\\n\\n" + system + \
"<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + \
'<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}
            {{- raise_exception("This model only supports single tool-calls at once!") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + "}<|eot_id|>" }}
    {%- else %}
        {{- "<|start_header_id|>ipython<|end_header_id|>\\n\\n" + message.content + "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

QWEN = """{%- set ns = namespace(last=-1, found=false) %}
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}
        {{- "\\n" }}{{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- endif %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" %}{% set ns.last = loop.revindex0 %}{% break %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and message.tool_calls %}
        {{- '<|im_start|>assistant' }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {{- tool_call.arguments | tojson(indent=2, sort_keys=true) }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' }}
        {%- generation %}{{ message.content }}{% endgeneration %}
        {{- (' (last)' if loop.index0 == ns.last else '') + '<|im_end|>' + '\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- \
endif %}
{%- endif %}
"""

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in <city> & around it: 天气",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": ' You are "quoted" & <b>bold</b>. '},
    {"role": "user", "content": "你好 👩‍👩‍👧‍👦\n\n  two lines  "},
    {"role": "assistant", "content": "Hello {{ not a template }} {% raw %}"},
    {"role": "user", "content": "And now?"},
]

TOOL_CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather in Zürich?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "get_weather", "arguments": {"city": "Zürich", "a": [1, None, True]}},
            }
        ],
    },
    {"role": "tool", "content": "<sunny>", "tool_call_id": "call_1"},
]


def chat_dir(path: Path, template: object, **config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    content = {"bos_token": "<|begin|>", "eos_token": {"content": "<|im_end|>"}, **config}
    (path / "tokenizer_config.json").write_text(json.dumps(content | {"chat_template": template}))
    return path


def load(path: Path, template: object, **config: object) -> ChatTemplate:
    return ChatTemplate.load(chat_dir(path, template, **config), wall_ns=CLOCK.wall_ns)


@pytest.fixture(scope="module")
def theirs(byte_level_dir: Path):
    """`apply_chat_template` of the transformers library."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(byte_level_dir / "tokenizer.json"), bos_token="<|begin|>", eos_token="<|im_end|>"
    )

    def apply(messages: list[dict[str, Any]], template: str, **options: object) -> str:
        return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options)

    return apply


@pytest.mark.parametrize("add_generation_prompt", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
@pytest.mark.parametrize("messages", [CHAT, TOOL_CHAT])
@pytest.mark.parametrize("template", [CHATML, LLAMA3, QWEN])
def test_prompts_are_those_of_transformers(
    theirs, tmp_path: Path, template: str, messages: list, tools: list | None, add_generation_prompt: bool
) -> None:
    extra = {"enable_thinking": False, "date_string": "26 Jul 2024"}
    expected = theirs(messages, template, tools=tools, add_generation_prompt=add_generation_prompt, **extra)
    ours = load(tmp_path, template).render(
        messages, tools=tools, add_generation_prompt=add_generation_prompt, extra=extra
    )
    assert ours == expected


def test_what_openai_sends_becomes_what_templates_expect(tmp_path: Path) -> None:
    template = load(tmp_path, QWEN)
    sent = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Weather"}, {"type": "text", "text": "in Zürich?"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Zürich"}'}}
            ],
        },
        {"role": "tool", "content": "sunny"},
    ]
    plain = [
        {"role": "user", "content": "Weather\nin Zürich?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Zürich"}}}],
        },
        {"role": "tool", "content": "sunny"},
    ]
    assert template.render(sent) == template.render(plain)
    assert sent[1]["content"] is None, "the request is left as it was"


def test_arguments_that_are_no_json_are_shown_as_they_were(tmp_path: Path) -> None:
    template = load(tmp_path, "{{ messages[0].tool_calls[0].function.arguments }}")
    for arguments, shown in (("{broken", "{broken"), ("", "{}"), ('{"a": 1}', "{'a': 1}")):
        message = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        assert template.render([message]) == shown


def test_image_parts_are_refused(tmp_path: Path) -> None:
    message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
    with pytest.raises(InvalidRequest, match="text only"):
        load(tmp_path, CHATML).render([message])


def test_the_date_is_the_clocks(tmp_path: Path) -> None:
    today = datetime.fromtimestamp(CLOCK.wall_ns() / 1e9).strftime("%d %b %Y")
    assert f"Today Date: {today}\n" in load(tmp_path, LLAMA3).render(CHAT)


def test_a_templates_own_refusal_reaches_the_client(tmp_path: Path) -> None:
    messages = [TOOL_CHAT[0], TOOL_CHAT[1] | {"tool_calls": TOOL_CHAT[1]["tool_calls"] * 2}]
    with pytest.raises(InvalidRequest, match="only supports single tool-calls at once") as caught:
        load(tmp_path, LLAMA3).render(messages)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[7].content.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[0].content | int / 0 }}",
        "{{ messages[0].content.nope.nope }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{% set ns = namespace(_x=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{{ dict.__class__() }}",
    ],
)
def test_failing_and_hostile_templates_are_a_refusal(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="the chat template"):
        load(tmp_path, template).render(CHAT)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(1000) %}{{ messages[0].content }}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ (1000000000000 * 'x') | length }}",
        "{{ ([0] * 1000000000000) | length }}",
        "{{ 99999 ** 99999 }}",
    ],
)
def test_prompts_are_bounded(tmp_path: Path, template: str) -> None:
    chat = ChatTemplate.load(chat_dir(tmp_path, template), wall_ns=CLOCK.wall_ns, prompt_chars_max=10_000)
    with pytest.raises(InvalidRequest, match=r"bound|power"):
        chat.render(CHAT)


def test_ordinary_arithmetic_works(tmp_path: Path) -> None:
    assert load(tmp_path, "{{ 2 ** 10 }} {{ '=' * 5 }} {{ 3 * 4 }}").render(CHAT) == "1024 ===== 12"


def test_named_templates(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]
    template = load(tmp_path, named)
    assert template.render(CHAT) == "plain"
    assert template.render(CHAT, tools=TOOLS) == "with tools"
    assert load(tmp_path, named[1:]).render(CHAT) == "with tools"


def test_template_files_win_over_the_config(tmp_path: Path) -> None:
    chat_dir(tmp_path, "config")
    (tmp_path / "chat_template.json").write_text('{"chat_template": "json"}')
    assert ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns).render(CHAT) == "json"
    (tmp_path / "chat_template.jinja").write_text("jinja 你好")
    assert ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns).render(CHAT) == "jinja 你好"
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    assert ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns).render(CHAT, tools=TOOLS) == "tools"


def test_special_tokens_of_the_older_file(tmp_path: Path) -> None:
    (tmp_path / "special_tokens_map.json").write_text(
        '{"bos_token": "<old>", "eos_token": {"content": "</s>"}}'
    )
    (tmp_path / "tokenizer_config.json").write_text(
        '{"bos_token": "<new>", "chat_template": "{{ bos_token }}{{ eos_token }}{{ pad_token }}"}'
    )
    assert ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns).render(CHAT) == "<new></s>"


def test_a_base_model_has_no_template(tmp_path: Path) -> None:
    template = ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns)
    assert not template.exists
    with pytest.raises(InvalidRequest, match="no chat template; use /v1/completions"):
        template.render(CHAT)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{% for %}", "line 1"),
        ([{"name": "default"}], "neither a string nor a list"),
        (7, "neither a string nor a list"),
    ],
)
def test_broken_templates_stop_the_start(tmp_path: Path, template: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, template)


def test_a_template_that_is_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(CheckpointError, match="not UTF-8 at byte 0"):
        ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns)
