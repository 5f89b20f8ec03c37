"""Which templates run in the gateway's process, what they may take there, and what the others may take in
theirs.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import ManualClock
from penstock.config.checkpoints import resolve
from penstock.errors import CheckpointError, InvalidRequest
from penstock.text.chat import ChatTemplate, ChildLimits
from penstock.text.sandbox import (
    ALLOWANCE,
    ALLOWANCE_PER_BYTE,
    REQUEST_BYTES_MAX,
    RanAway,
    measure,
    template_environment,
)

CLOCK = ManualClock()
SHORT = ChildLimits(cpu_s=0.2, memory_bytes=64 * 1024 * 1024, chars_max=1_000_000)
MESSAGES = [{"role": "user", "content": "hello" * 100}]

RUN_AWAY = {
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "doubling": "{% set ns = namespace(x='xxxxxxxx') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x "
    "%}{% endfor %}",
    "doubling in a row": "{% set x = 'xxxxxxxx' %}" + "{% set x = x + x %}" * 60,
    "lists": "{% set x = [1] %}" + "{% set x = x + x %}" * 60,
    "lists of the same list": "{% set x = [1] %}" + "{% set x = [x, x] %}" * 60 + "{{ x }}",
    "objects": "{% set x = 1 %}" + "{% set x = {'a': x, 'b': x} %}" * 60 + "{{ x | tojson }}",
    "macros": "{% macro f(n) %}{% if n < 60 %}{{ f(n + 1) }}{{ f(n + 1) }}{% endif %}{% endmacro %}{{ f(0) "
    "}}",
    "numbers": "{% set x = 10 %}" + "{% set x = x * x %}" * 60,
    "replacing": "{{ 'x'" + f"| replace('', '{'y' * 64}')" * 12 + " }}",
    "format of what varies": "{{ (messages[0].role ~ '%0999999999d') % 1 }}",
    "a long list": "{% set r = range(99999) | list %}{% for i in range(9999) %}{{ r | tojson | length }}{% "
    "endfor %}",
    "a range": "{% for i in range(99999) %}{{ 'x' in range(99999) }}{% endfor %}",
    "characters": "{% set x = 'x' * 900000 %}{% for i in range(9999) %}{{ (x | list) | length }}{% endfor %}",
    "an alias": "{% set ns = namespace() %}{% set ns.split = ''.center %}{{ ns.split(999999999) | length }}",
}
"""Each step has a price, and there are too many."""
NOT_PRICED = {
    "format": "{{ '%0999999999d' % 1 }}",
    "center": "{{ 'x' | center(999999999) }}",
    "method": "{{ 'x'.center(999999999) }}",
    "indent": "{{ messages | tojson(indent=999999999) }}",
    "filler": "{{ lipsum(10000000) }}",
    "dict": "{{ dict(split=''.center).split(999999999) }}",
    "powers": "{{ 1.5 | round(999999999, 'ceil') }}",
    "wide": "{{ messages | tojson(indent='INDENT') }}{{ 'x'.center(999999999) }}".replace("INDENT", "x" * 60),
    "assigned": "{% set range = ''.center %}{{ range(999999999) }}",
    "a function by another name": "{% macro f() %}{% endmacro %}{% set f = ''.center %}{{ f(999999999) }}",
    "recursion": "{% for a in [[1]] recursive %}{{ loop(a) }}{% endfor %}",
}


def load(source: str, limits: ChildLimits = SHORT) -> ChatTemplate:
    return ChatTemplate(
        {"default": source},
        special_tokens={},
        wall_ns=CLOCK.wall_ns,
        prompt_chars_max=1_000_000,
        child_limits=limits,
    )


@pytest.mark.parametrize("source", RUN_AWAY.values(), ids=RUN_AWAY)
def test_what_runs_away_is_stopped_here_and_ended_there(source: str) -> None:
    template = load(source)
    assert template.runs_here(with_tools=False)
    with pytest.raises(RanAway):
        template.render_values({"messages": MESSAGES}, may_block=False)
    assert not template.runs_here(with_tools=False), "it has been tried once"
    with pytest.raises(InvalidRequest, match="chat template") as refused:
        template.render(MESSAGES)
    assert refused.value.param == "messages"
    template.close()


@pytest.mark.parametrize("source", NOT_PRICED.values(), ids=NOT_PRICED)
def test_what_has_no_price_does_not_even_begin_here(source: str) -> None:
    template = load(source)
    assert not template.runs_here(with_tools=False)
    with pytest.raises(InvalidRequest, match="chat template"):
        template.render(MESSAGES)
    template.close()


def test_the_process_is_started_again_after_it_was_ended() -> None:
    template = load("{% if kill %}{{ lipsum(10000000) }}{% endif %}{{ messages[0].content.center(9) }}")
    for _ in range(2):
        assert template.render([{"role": "user", "content": "abc"}]) == "   abc   "
        with pytest.raises(InvalidRequest, match=r"processor time|MiB of memory"):
            template.render(MESSAGES, extra={"kill": True})
    template.close()


def test_the_process_answers_as_this_one_does() -> None:
    apart = "{{ ''.center(0) }}{{ strftime_now('%d %b %Y') }}{{ bos }}{{ messages[0].content }}"
    template, extra = load(apart), {"bos": "\ud800 10²⁰ <s>", "n": 10**30}
    here = load(apart.replace("''.center(0)", "''"))
    assert template.render(MESSAGES, extra=extra) == here.render(MESSAGES, extra=extra)
    for source, said in (
        ("{{ raise_exception('no such role') }}{{ ''.center(0) }}", "the chat template: no such role"),
        ("{{ messages[0].content.center('x') }}", "the chat template fails on these messages"),
        ("{{ 'x' * 1000000 }}{{ 'x'.center(9) }}", "makes a prompt over the bound of 1000000 characters"),
    ):
        with pytest.raises(InvalidRequest, match=said):
            load(source).render(MESSAGES)


def test_what_nests_too_deeply_is_refused_when_it_is_loaded() -> None:
    for source in (
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{{ " + "[" * 300 + "1" + "]" * 300 + " }}",
        "{% for a in [1] %}" * 30 + "{% endfor %}" * 30,
    ):
        with pytest.raises(CheckpointError, match="nests too deeply"):
            load(source)


def test_constants_are_not_folded_while_a_template_is_loaded() -> None:
    template = load("{% if false %}{{ 'x' | center(999999999) }}{{ '%0999999999d' % 1 }}{% endif %}fine")
    assert template.render(MESSAGES) == "fine"
    template.close()


def test_large_requests_are_rendered_in_the_process() -> None:
    template = load("{{ messages[0].content }}")
    long = [{"role": "user", "content": "x" * (REQUEST_BYTES_MAX + 1)}]
    with pytest.raises(RanAway):
        template.render_values({"messages": long}, may_block=False)
    assert template.render(long) == long[0]["content"]
    assert template.runs_here(with_tools=False), "the template is not to blame"
    template.close()


def test_the_demo_models_template_runs_here_and_takes_little() -> None:
    config = json.loads((resolve("penstock-demo") / "tokenizer_config.json").read_text())
    template = load(config["chat_template"])
    tools = [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"properties": {"a": {"type": "string"}}}},
        }
    ]
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}] * 200
    assert template.render(messages, tools=tools * 20)
    assert template.runs_here(with_tools=True)


@given(
    content=st.text(st.sampled_from("ab <&\"'\n</think>é"), max_size=40),
    tools=st.lists(
        st.dictionaries(st.text(max_size=3), st.none() | st.integers() | st.text(max_size=5), max_size=3)
    ),
    source=st.sampled_from(
        [
            "{{ messages[0].content | trim | upper ~ tools }}{{ 1 + 2 * 3 - 4 // 2 % 3 }}",
            (
                "{% for t in tools %}{{ loop.index }}{% for k, v in t.items() %}{{ k + '=' ~ v }}{% endfor "
                "%}{% endfor %}"
            ),
            (
                "{% set x = [messages[0].content, tools] + [1] %}{{ x | tojson(indent=2) }}{{ x[:1] | "
                "join('-') }}"
            ),
            "{% macro m(a, b='q') %}<{{ a }}{{ b | e }}>{% endmacro %}{{ m(messages[0].content) ~ m(1, 2) }}",
            (
                "{% set ns = namespace(n=0) %}{% for c in messages[0].content %}{% set ns.n = ns.n + 1 %}{% "
                "endfor %}{{ ns.n }}"
            ),
            "{{ messages[0].content.split('</think>')[-1].lstrip('\n') }}{{ 'a' in messages[0].content }}",
            (
                "{{ tools | map('string') | join(',') }}{{ tools | selectattr('a') | list | length }}{{ 'ab' "
                "* 3 }}"
            ),
            "{% set t %}[{{ messages[0].content }}]{% endset %}{{ t | replace('a', 'bb') | safe + '<' }}",
        ]
    ),
)
def test_prices_change_nothing_in_what_is_written(content: str, tools: list, source: str) -> None:
    values = {"messages": [{"role": "user", "content": content}], "tools": tools}
    plain = template_environment(CLOCK.wall_ns, chars_max=10**6).from_string(source).render(values)
    assert load(source).render_values(values, may_block=False) == plain


@given(
    st.recursive(
        st.text(max_size=99) | st.none() | st.floats(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    )
)
def test_a_value_measures_at_most_its_json(value: object) -> None:
    assert measure(value, 10**9) <= 2 * len(json.dumps(value)) + 2
    allowance = ALLOWANCE + ALLOWANCE_PER_BYTE * len(json.dumps(value))
    assert measure(value, allowance) <= allowance


def test_templates_of_a_directory_say_why_they_run_apart(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("a\n{{ 'x' | center(3) }}")
    template = ChatTemplate.load(tmp_path, wall_ns=CLOCK.wall_ns)
    assert template.apart == {"default": "line 2: the filter center"}
    assert template.render(MESSAGES) == "a\n x "
    template.close()
