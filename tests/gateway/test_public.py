import pytest
from byte_tokenizer import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from penstock.clock import SystemClock
from penstock.errors import ConfigError
from penstock.gateway.models.served import NO_PUBLIC_PREFIXES, PublicPrefixes
from penstock.text.chat import ChatTemplate

SYSTEM = "You are the assistant of a water works. Be brief."
HEAD = f"<|system|>{SYSTEM}\n<|user|>"
PROMPTED = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
)


def template(source: str = PROMPTED) -> ChatTemplate:
    sources = {"default": source} if source else {}
    return ChatTemplate(sources, special_tokens={}, wall_ns=SystemClock().wall_ns)


def prefixes(*texts: str, source: str = PROMPTED) -> PublicPrefixes:
    return PublicPrefixes.of(texts, byte_tokenizer(), template(source))


@pytest.mark.parametrize(
    ("prompt", "public"),
    [
        (HEAD + "What is a penstock?\n", len(HEAD)),
        (SYSTEM + " And then?", len(SYSTEM)),
        (SYSTEM[:20], 20),
        (f"<|system|>{SYSTEM[:-1]}!\n", len("<|system|>") + len(SYSTEM) - 1),
        ("<|user|>" + SYSTEM, 2),
        (" " + SYSTEM, 0),
        ("", 0),
    ],
    ids=["chat", "plain", "a part", "other at the end", "not at its place", "shifted", "empty"],
)
def test_only_what_equals_a_declared_text_from_its_start_is_public(prompt: str, public: int) -> None:
    tokens = byte_tokenizer().encode(prompt)
    assert prefixes(SYSTEM).num_tokens_of(tokens) == public
    assert prefixes("something else altogether", SYSTEM).num_tokens_of(tokens) == public
    assert NO_PUBLIC_PREFIXES.num_tokens_of(tokens) == 0


@given(
    st.lists(st.integers(0, 2), max_size=700), st.integers(0, 700), st.lists(st.integers(0, 2), max_size=20)
)
def test_the_common_prefix_is_the_longest(left: list[int], cut: int, tail: list[int]) -> None:
    right = [*left[:cut], *tail]
    expected = next(
        (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right))
    )
    assert PublicPrefixes([tuple(left)]).num_tokens_of(right) == expected


@pytest.mark.parametrize("source", ["", NO_SYSTEM], ids=["no template", "no system prompts"])
def test_models_without_system_prompts_share_plain_ones(source: str) -> None:
    assert prefixes(SYSTEM, source=source).num_tokens_of(byte_tokenizer().encode(HEAD)) == 0
    assert prefixes(SYSTEM, source=source).num_tokens_of(byte_tokenizer().encode(SYSTEM)) == len(SYSTEM)


def test_a_text_that_could_share_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"public_prefixes\[1\]: has 2 tokens .* blocks of 16"):
        prefixes(SYSTEM, "Hi", source="")


def test_workers_are_told_what_is_public_and_callers_cannot_say_it(start, kit) -> None:
    running = start(public=(SYSTEM,))
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "?"}]
    bodies = [
        ("/v1/chat/completions", {"messages": messages, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": messages[1:], "max_tokens": 1}),
        ("/v1/completions", {"prompt": [SYSTEM + "x", "x"], "max_tokens": 1}),
    ]
    for path, body in bodies:
        raw = kit.Raw(running)
        raw.send(kit.post(path, {"model": "tiny", **body}))
        raw.read_until(b'"usage"')
        raw.close()
    head = len(f"<|system|>{SYSTEM}<|user|>")
    assert [request.public_tokens for request in running.requests] == [head, 2, len(SYSTEM), 0]
    assert len({request.cache_salt for request in running.requests}) == 1
    raw = kit.Raw(running)
    raw.send(kit.post("/v1/completions", {"model": "tiny", "prompt": "secret" * 9, "public_tokens": 54}))
    raw.read_until(b"\r\n\r\n")
    raw.close()
    assert not any(request.public_tokens for request in running.requests[4:])
