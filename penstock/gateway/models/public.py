"""Which leading tokens of a prompt are public: what an operator declared in `models[].public_prefixes`.

Tenants' KV caches are apart, so that nobody learns from a fast answer what others have asked. A system prompt
that the operator himself publishes is no such secret: KV blocks that hold nothing but its tokens are shared
by all. Only tokens that equal the operator's, from the very first one, are ever called public, whatever a
caller sends.
"""

from collections.abc import Iterable, Iterator, Sequence

from penstock.errors import ConfigError, InvalidRequest
from penstock.rng import fresh_key
from penstock.text.chat import ChatTemplate
from penstock.text.markers import NONCE_BYTES
from penstock.text.prompt import ChatPrompts
from penstock.text.tokenizer import Tokenizer
from penstock.types import BLOCK_TOKENS

_CHUNK = 256
"""Tokens compared at a time."""


class PublicPrefixes:
    """The declared prefixes of one model, as tokens."""

    __slots__ = ("_prefixes",)

    def __init__(self, prefixes: Iterable[tuple[int, ...]]) -> None:
        self._prefixes = tuple(dict.fromkeys(prefixes))

    @classmethod
    def of(cls, texts: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate) -> "PublicPrefixes":
        """Tokenize each text as the start of a plain prompt and as the system prompt of a chat.

        Raises:
            ConfigError: a text has less than one block of tokens, so nothing could be shared.
        """
        found: list[tuple[int, ...]] = []
        prompts = ChatPrompts(template, tokenizer, nonce=fresh_key(NONCE_BYTES)) if texts else None
        for i, text in enumerate(texts):
            assert prompts is not None
            forms = list(_forms(text, tokenizer, prompts))
            if (longest := max(map(len, forms))) < BLOCK_TOKENS:
                raise ConfigError(
                    f"models[].public_prefixes[{i}]: has {longest} tokens with its chat template; "
                    f"blocks of {BLOCK_TOKENS} are shared, so it would share nothing"
                )
            found += forms
        return cls(found)

    def num_tokens_of(self, prompt: Sequence[int]) -> int:
        """How many leading tokens of `prompt` are public."""
        return max((_num_common(prefix, prompt) for prefix in self._prefixes), default=0)


NO_PUBLIC_PREFIXES = PublicPrefixes(())


def _forms(text: str, tokenizer: Tokenizer, prompts: ChatPrompts) -> Iterator[tuple[int, ...]]:
    """The ways in which a prompt may begin with `text`."""
    yield tokenizer.encode(text)
    yield tokenizer.encode(text, add_special_tokens=True)
    if not prompts.template.exists:
        return
    system = {"role": "system", "content": text}
    try:
        # Two chats that differ in the first character of the question: what they have in common comes before
        # it.
        one, other = (
            prompts.token_ids([system, {"role": "user", "content": content}]) for content in ("A", "7")
        )
    except InvalidRequest:
        return  # This template takes no system prompt.
    yield one[: _num_common(one, other)]


def _num_common(left: Sequence[int], right: Sequence[int]) -> int:
    """The length of the common prefix."""
    length = min(len(left), len(right))
    start = 0
    while start < length and tuple(left[start : start + _CHUNK]) == tuple(right[start : start + _CHUNK]):
        start += _CHUNK
    while start < length and left[start] == right[start]:
        start += 1
    return min(start, length)
