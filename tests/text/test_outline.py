"""Prompts from outlines are those that the template makes, and a template that reads texts has none for
what it reads.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.config.checkpoints import resolve
from penstock.text.chat import ChatTemplate, template_values
from penstock.text.outline import OUTLINES_MAX, Outlines
from penstock.text.prompt import ChatPrompts
from penstock.text.sandbox import RanAway
from penstock.text.tokenizer import Tokenizer
from tests.text.test_markers import CHATML, DEEPSEEK, GEMMA, LLAMA3, MISTRAL, PHI

CLOCK = ManualClock()
DEMO = ChatTemplate.load(resolve("penstock-demo-mini"), wall_ns=CLOCK.wall_ns).sources["default"]
THINKING = """{%- if messages[0].role == 'system' %}{{- '<|im_start|>' + messages[0]['content'] + '\n\n' }}
{%- endif %}{%- set ns = namespace(seeks=true, last=messages|length - 1) %}
{%- for message in messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}
{%- if ns.seeks and message.role == "user" and message.content is string and
    not(message.content.startswith('<tool_response>') and message.content.endswith('</tool_response>')) %}
{%- set ns.seeks = false %}{%- set ns.last = index %}{%- endif %}{%- endfor %}
{%- for message in messages %}{%- set content = message.content if message.content is string else '' %}
{%- if message.role == "assistant" %}{%- set thought = '' %}{%- if '</think>' in content %}
{%- set thought = content.split('</think>')[0].rstrip('\n').split('<think>')[-1].lstrip('\n') %}
{%- set content = content.split('</think>')[-1].lstrip('\n') %}{%- endif %}
{%- if loop.index0 > ns.last and thought %}{{- '<think>' + thought.strip('\n') + '</think>' }}{%- endif %}
{{- '<|im_start|>assistant\n' + content + '<|im_end|>' }}
{%- elif message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{- '<|im_start|>user' }}{%- endif %}
{{- '<tool_response>' ~ content }}
{%- else %}{{- '<|im_start|>' + message.get('role') + '\n' + content + '<|im_end|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"""
"""As Qwen 3."""
FAMILIES = {
    "demo": DEMO, "chatml": CHATML, "llama 3": LLAMA3, "mistral": MISTRAL, "gemma": GEMMA, "phi": PHI,
    "deepseek": DEEPSEEK, "thinking": THINKING,
}  # fmt: skip
FORMS = (("user",), ("system", "user"), ("system", "user", "assistant", "user"), ("user", "tool", "tool"))
LOOP = "{% for m in messages %}"
READS = {
    "length": LOOP + "{{ m.content | length }}{% endfor %}",
    "upper": LOOP + "{{ m.content.upper() }}{% endfor %}",
    "first character": LOOP + "{{ m.content[0] }}{% endfor %}",
    "its ends of other characters": LOOP + "{{ m.content.strip('a') }}{% endfor %}",
    "compared": LOOP + "{% if m.content == m.role %}x{% endif %}{% endfor %}",
    "compared with a name": LOOP + "{% set x = 'a' %}{{ 'y' if x in m.content }}{% endfor %}",
    "ordered": LOOP + "{% if m.content > 'b' %}x{% endif %}{% endfor %}",
    "counted by a loop": LOOP + "{% for c in m.content %}x{% endfor %}{% endfor %}",
    "by a name put together": LOOP + "{% for c in m['con' + 'tent'] %}x{% endfor %}{% endfor %}",
    "by a name that varies": "{% set k = 'content' %}" + LOOP + "{{ m[k] | length }}{% endfor %}",
    "as JSON": "{{ messages | tojson }}",
    "a message": LOOP + "{{ m }}{% endfor %}",
    "its fields": LOOP + "{% for k, v in m.items() %}{{ v }}{% endfor %}{% endfor %}",
    "mapped": "{{ messages | map(attribute='content') | map('length') | list | string }}",
    "in a list": LOOP + "{{ [m.content] | tojson }}{% endfor %}",
    "behind a namespace": "{% set ns = namespace(t='') %}"
    + LOOP
    + "{% set ns.t = ns.t + m.content %}{% endfor %}{{ ns.t | length }}",
    "in a macro": "{% macro f(x) %}{{ x | length }}{% endmacro %}" + LOOP + "{{ f(m.content) }}{% endfor %}",
    "trimmed together": LOOP + "{{ (m.content + ' ') | trim }}{% endfor %}",
    "a block": "{% set b %}" + LOOP + "{{ m.content }}{% endfor %}{% endset %}{{ b | length }}",
    "the date": "{{ strftime_now('%d') }}" + LOOP + "{{ m.content }}{% endfor %}",
    "the date by another name": "{% set f = strftime_now %}{{ f('%d') }}",
    "alike messages": "{% if messages[0] == messages[-1] %}x{% endif %}",
    "refused": LOOP + "{{ raise_exception('no ' + m.role) }}{% endfor %}",
    "whether it has a made-up name's letter": LOOP + "{{ 'a' if 'x' in m.content else 'b' }}{% endfor %}",
    "split at a made-up name's letter": LOOP + "{{ m.content.split('x')[0] }}{% endfor %}",
    "begins as a made-up name": LOOP + "{{ 'a' if m.content.startswith('q') else 'b' }}{% endfor %}",
    "ends as a made-up name": LOOP + "{{ 'a' if m.content.endswith('zq') else 'b' }}{% endfor %}",
    "has the nonce": LOOP + "{{ 'a' if '0011' in m.content else 'b' }}{% endfor %}",
    "case": LOOP + "{% if m.content is lower %}x{% endif %}{% endfor %}",
    "capitals": LOOP + "{{ m.content | title }}{% endfor %}",
    "slice": LOOP + "{{ m.content[:3] }}{% endfor %}",
    "slice that its length bounds": LOOP + "{{ 'abc'[:m.content | length] }}{% endfor %}",
    "default": LOOP + "{{ m.content | default('x', true) }}{% endfor %}",
    "replaced": LOOP + "{{ m.content | replace('a', 'b') }}{% endfor %}",
    "replaced by a method": LOOP + "{{ m.content.replace('a', 'b') }}{% endfor %}",
    "searched": LOOP + "{{ m.content.find('a') }}{% endfor %}",
    "counted": LOOP + "{{ m.content.count('a') }}{% endfor %}",
    "lines": LOOP + "{{ m.content.splitlines() | length }}{% endfor %}",
    "words": LOOP + "{{ m.content.split() | length }}{% endfor %}",
    "a number": LOOP + "{{ m.content | int }}{% endfor %}",
    "a key": LOOP + "{{ {'How?': 'x'}[m.content] }}{% endfor %}",
    "a key that is asked for": LOOP + "{{ {'How?': 'x'}.get(m.content, 'y') }}{% endfor %}",
    "a key of its own": LOOP + "{{ {m.content: 'x'} | tojson }}{% endfor %}",
    "one of some": LOOP + "{{ 'x' if m.content in ['How?', 'Why?'] }}{% endfor %}",
    "one of some by a test": LOOP + "{{ 'x' if m.content is in(['How?']) }}{% endfor %}",
    "equal by a test": LOOP + "{{ 'x' if m.content is eq('How?') }}{% endfor %}",
    "sorted": "{% for m in messages | sort(attribute='content') %}{{ m.role }}{% endfor %}",
    "grouped": "{% for g in messages | groupby('content') %}x{% endfor %}",
    "chosen by it": "{{ messages | selectattr('content', 'eq', 'How?') | list | length }}",
    "largest": "{{ (messages | max(attribute='content')).role }}",
    "unique": "{{ messages | unique(attribute='content') | list | length }}",
    "changed since the last": LOOP + "{{ 'x' if loop.changed(m.content) }}{% endfor %}",
    "a message among them": "{{ 'x' if {'role': 'user', 'content': 'How?'} in messages else 'y' }}",
    "formatted": LOOP + "{{ '%5s' % m.content }}{% endfor %}",
    "formatted by a method": LOOP + "{{ '{:>99}'.format(m.content) }}{% endfor %}",
    "repeated": LOOP + "{{ m.content * 2 }}{% endfor %}",
    "escaped": LOOP + "{{ m.content | e }}{% endfor %}",
    "escaped by what is before it": LOOP + "{{ ('<b>' | safe) + m.content }}{% endfor %}",
    "a macro by the name of the check": "{% macro raise_exception(x) %}{% endmacro %}"
    + LOOP
    + "{{ m.content | length }}{% endfor %}",
    "a parameter by the name of the check": "{% macro f(x, raise_exception) %}{{ x | length }}{% endmacro %}"
    + LOOP
    + "{{ f(m.content, 'x'.count) }}{% endfor %}",
    "a macro by the name of the date": "{% if false %}{% macro strftime_now(x) %}{% endmacro %}{% endif %}"
    + "{{ strftime_now('%d') }}"
    + LOOP
    + "{{ m.content }}{% endfor %}",
    "two of one name": "{% macro f(x) %}{{ x }}{% endmacro %}{% macro f(x) %}{{ x|length }}{% endmacro %}"
    + LOOP
    + "{{ f(m.content) }}{% endfor %}",
}
"""Of each, no chat has an outline."""
TEXTS = st.one_of(
    st.text(max_size=20),
    st.lists(
        st.sampled_from([
            "a", "ü", " ", "\n", "<think>", "</think>", "<tool_response>", "</tool_response>", "<|im_end|>",
            "<|im_", "end|>", "{{", "}}", '"', "\\", "Water", "\u2028", "\ud800",
        ]),
        max_size=5,
    ).map("".join),
)  # fmt: skip


def template_of(source: str, chars_max: int = 100_000) -> ChatTemplate:
    tokens = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    return ChatTemplate(
        {"default": source}, special_tokens=tokens, wall_ns=CLOCK.wall_ns, prompt_chars_max=chars_max
    )


def outlines_of(source: str, chars_max: int = 100_000) -> Outlines:
    found = template_of(source, chars_max).outlines(nonce="0011")
    assert found is not None
    return found


def rendered(template: ChatTemplate, roles: tuple[str, ...], texts: list[str]) -> str:
    return template.render([{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)])


@pytest.mark.parametrize("form", FORMS, ids="-".join)
@pytest.mark.parametrize("source", FAMILIES.values(), ids=FAMILIES)
def test_every_family_has_outlines(source: str, form: tuple[str, ...]) -> None:
    outlines, template = outlines_of(source), template_of(source)
    for texts in (["How?"] * len(form), [f"Text {i}\nof\tmany words." * 9 for i in range(len(form))]):
        assert outlines.prompt(form, texts, add_generation_prompt=True) == rendered(template, form, texts)


@pytest.mark.parametrize("source", FAMILIES.values(), ids=FAMILIES)
def test_any_texts_give_the_prompt_of_the_template(source: str) -> None:
    outlines, template = outlines_of(source), template_of(source)

    @settings(max_examples=40)
    @given(st.sampled_from(FORMS), st.data())
    def check(form: tuple[str, ...], data: st.DataObject) -> None:
        texts = data.draw(st.lists(TEXTS, min_size=len(form), max_size=len(form)))
        found = outlines.prompt(form, texts, add_generation_prompt=True)
        assert found is None or found == rendered(template, form, texts)

    check()


@pytest.mark.parametrize("source", READS.values(), ids=READS)
def test_a_template_that_reads_texts_has_none(source: str) -> None:
    outlines = template_of(source).outlines(nonce="0011")
    for form in FORMS:
        texts = ["How?"] * len(form)
        assert outlines is None or outlines.prompt(form, texts, add_generation_prompt=True) is None


def test_a_neighbour_is_a_message_by_whatever_name() -> None:
    outlines = outlines_of(LOOP + "{{ loop['next' + 'item'] | tojson if not loop.last }}{% endfor %}")
    assert outlines.prompt(["user"], ["How?"], add_generation_prompt=True) == ""
    assert outlines.prompt(["user", "user"], ["How?", "Why?"], add_generation_prompt=True) is None


def test_a_word_that_is_in_no_made_up_name_is_looked_for() -> None:
    outlines = outlines_of(LOOP + "{{ 'a' if 'k' in m.content else m.content.split('k')[0] }}{% endfor %}")
    assert outlines.prompt(["user"], ["How?"], add_generation_prompt=True) == "How?"
    assert outlines.prompt(["user"], ["ok"], add_generation_prompt=True) is None


def test_a_template_that_takes_too_much_for_a_form_has_none_for_it() -> None:
    source = (
        LOOP
        + "{% for n in messages %}{% if n.role == 'user' and m.role == 'user' and not n.tools %}{{ n.role }}"
        + "{% endif %}{% endfor %}{{ m.content }}{% endfor %}"
    )
    outlines, template = outlines_of(source), template_of(source)
    values = template_values([{"role": "user", "content": "x"}] * 130)
    with pytest.raises(RanAway):
        template.render_values(values, num_bytes=0, may_block=False)
    for _ in range(2):
        assert outlines.prompt(["user"] * 130, ["x"] * 130, add_generation_prompt=True) is None
    found = outlines.prompt(["user"] * 2, ["x", "y"], add_generation_prompt=True)
    assert found == "useruserxuserusery"


def test_only_what_is_reached_counts() -> None:
    outlines = outlines_of(
        LOOP + "{{ m.content if m.role == 'user' else m.content | upper }}{{ m.content }}{% endfor %}"
    )
    assert outlines.prompt(["user"], ["How?"], add_generation_prompt=True) == "How?How?"
    assert outlines.prompt(["tool"], ["How?"], add_generation_prompt=True) is None


@pytest.mark.parametrize("text", ["", " a", "a\n", "a </think> b"])
def test_texts_that_a_template_would_treat_otherwise_are_left_to_it(text: str) -> None:
    assert outlines_of(THINKING).prompt(["user"], [text], add_generation_prompt=True) is None


def test_bounds_of_the_prompt_and_of_what_is_kept() -> None:
    outlines = outlines_of(LOOP + "{{ m.content }}{{ m.content }}!{% endfor %}", chars_max=101)
    assert outlines.prompt(["user"], ["x" * 50], add_generation_prompt=True) == "x" * 100 + "!"
    assert outlines.prompt(["user"], ["x" * 51], add_generation_prompt=True) is None
    for count in range(1, OUTLINES_MAX + 3):
        outlines.prompt(["user"] * count, ["x"] * count, add_generation_prompt=True)
    assert len(outlines) <= OUTLINES_MAX


@pytest.mark.parametrize("trusted", [False, True])
@pytest.mark.parametrize("text", ["How?", "a<|im_end|>b", "a <|im", "</s>", "naïve ü", "\ud7ff"])
def test_token_ids_are_the_same(byte_level_dir: Path, text: str, trusted: bool) -> None:
    tokenizer = Tokenizer.load(byte_level_dir)
    prompts = ChatPrompts(template_of(CHATML), tokenizer, nonce=bytes(8))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": text}]
    found = prompts.of_texts(["system", "user"], ["Be brief.", text], trusted=trusted)
    if found is None:
        assert not trusted, "the markers in it are meant"
        assert "<|" in text, "only markers need the twin"
    else:
        assert found == prompts.token_ids(messages, trusted=trusted)


def test_a_base_model_has_none(byte_level_dir: Path) -> None:
    template = ChatTemplate({}, special_tokens={}, wall_ns=CLOCK.wall_ns)
    prompts = ChatPrompts(template, Tokenizer.load(byte_level_dir), nonce=bytes(8))
    assert prompts.of_texts(["user"], ["How?"]) is None
