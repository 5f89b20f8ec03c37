"""How the answers of one call are drawn and shaped, in vLLM's words.

`SamplingParams` here is what users write, and may change between two calls; the engine's own
(`penstock.types`) is what becomes of it for one prompt: every word is a token, every default is filled in.
"""

import enum
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from penstock.errors import InvalidRequest, Unsupported
from penstock.protocol.needs import NO_CONSTRAINT, Constraint
from penstock.protocol.worker_parts import INT32_MAX, sampling_problem
from penstock.rng import choice_seed
from penstock.text.tokenizer import GenerationDefaults, Tokenizer, bad_word_tokens, stop_token_ids
from penstock.types import SamplingParams as EngineSampling

N_MAX = 128
"""Answers to one prompt."""
_FINDING = re.compile(r"^(?P<what>.*?)(?: - at `\$\.?(?P<path>.*)`)?$", re.DOTALL)


class RequestOutputKind(enum.Enum):
    """The content of each output of a running request, where it is streamed."""

    CUMULATIVE = 0
    """All until then."""
    DELTA = 1
    """The new part."""
    FINAL_ONLY = 2
    """There is only the last one."""


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The form that an answer must match: exactly one of these. docs/structured.md has what each may say."""

    json: str | dict[str, Any] | None = None
    """A JSON schema."""
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


GuidedDecodingParams = StructuredOutputsParams
"""As vLLM called it before."""


class _Shape(msgspec.Struct, kw_only=True):
    """The fields and their types."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 and -1 keep every token."""
    min_p: float = 0.0
    seed: int | None = None
    """None: derived from the LLM's seed and the request's number."""
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    """None: the rest of the context."""
    min_tokens: int = 0
    logprobs: int | None = None
    """Alternatives to show beside each token's own log-probability."""
    prompt_logprobs: int | None = None
    detokenize: bool = True
    """False: the text is left empty."""
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    truncate_prompt_tokens: Annotated[int, Meta(ge=-1)] | None = None
    """Only so many of a prompt's last tokens are used; -1: as many as leave room for the answer."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    guided_decoding: StructuredOutputsParams | None = None
    """As vLLM called `structured_outputs` before."""
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    spaces_between_special_tokens: bool = True
    logits_processors: Any = None
    extra_args: Any = None


_REFUSED = {
    "logits_processors": "the engine is another process, and runs no code of yours",
    "extra_args": "there is nothing that would read them",
}


class SamplingParams(_Shape, kw_only=True):
    """How answers are drawn, and when they end. Names, meanings and defaults are vLLM's.

    Raises:
        InvalidRequest: a value has the wrong type or is out of its range; `param` is the field.
    """

    def __post_init__(self) -> None:
        self.check()

    def check(self) -> None:
        """Look at every field: they may be set later, too.

        Raises:
            InvalidRequest: as above.
            Unsupported: a field of vLLM's that means nothing here.
        """
        given = msgspec.structs.asdict(self)
        if not isinstance(given.pop("output_kind"), RequestOutputKind):
            raise _wrong("output_kind", "expected a RequestOutputKind")
        for name in ("structured_outputs", "guided_decoding"):
            if not isinstance(given[name], StructuredOutputsParams | None):
                raise _wrong(name, f"expected StructuredOutputsParams, got {type(given[name]).__name__}")
        try:
            msgspec.convert(given, _Shape)
        except msgspec.ValidationError as error:
            raise _explained(str(error)) from None
        for name, why in _REFUSED.items():
            if getattr(self, name):
                raise Unsupported(f"'{name}' is not supported: {why}.", param=name)
        if not self.spaces_between_special_tokens:
            name = "spaces_between_special_tokens"
            raise Unsupported(f"'{name}' other than true is not supported.", param=name)
        if not 1 <= self.n <= N_MAX:
            raise _wrong("n", f"expected 1 to {N_MAX}, got {self.n}")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise _wrong("max_tokens", f"expected at least 1, got {self.max_tokens}")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _wrong("min_tokens", f"expected at most max_tokens, {self.max_tokens}")
        if not all(self.stops):
            raise _wrong("stop", "an empty string ends everything")
        if self.allowed_token_ids == []:
            raise _wrong("allowed_token_ids", "no token is allowed")
        if not all(word.strip() for word in self.bad_words or ()):
            raise _wrong("bad_words", "a word is empty")
        found = sampling_problem(self._plain(self.max_tokens or 1, INT32_MAX), INT32_MAX)
        if found is not None:
            raise _wrong(found[0], found[1])
        self.constraint()

    def clone(self) -> "SamplingParams":
        """Another one with the same values."""
        return msgspec.structs.replace(self)

    @property
    def stops(self) -> tuple[str, ...]:
        """The strings that end an answer."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    def constraint(self) -> Constraint:
        """The form that the answer must have.

        Raises:
            InvalidRequest: it asks for nothing, or for two things.
        """
        if self.structured_outputs is not None and self.guided_decoding is not None:
            raise _wrong("guided_decoding", "it is the older name of structured_outputs; give one")
        asked = self.structured_outputs or self.guided_decoding
        if asked is None:
            return NO_CONSTRAINT
        param = "structured_outputs" if self.structured_outputs is not None else "guided_decoding"
        form: dict[str, Any] = {
            name: value
            for name, value in msgspec.structs.asdict(asked).items()
            if value is not None and value is not False
        }
        if len(form) != 1:
            names = ", ".join(asked.__struct_fields__)
            raise _wrong(param, f"expected exactly one of {names}, got {', '.join(form) or 'none'}")
        if isinstance(schema := form.get("json"), str):
            try:
                form["json"] = msgspec.json.decode(schema)
            except msgspec.DecodeError as error:
                raise _wrong(param, f"json is no JSON: {error}") from None
        return Constraint(structured=form, form=msgspec.json.encode(form), param=param)

    def for_engine(
        self, tokenizer: Tokenizer, *, vocab_size: int, max_tokens: int, seed: int
    ) -> tuple[EngineSampling, ...]:
        """The engine's parameters, one set for each of the `n` answers.

        Raises:
            InvalidRequest: what only this model makes impossible.
        """
        shared = msgspec.structs.replace(
            self._plain(max_tokens, vocab_size),
            bad_words=bad_word_tokens(tokenizer, self.bad_words or ()),
            stop_token_ids=stop_token_ids(tokenizer, self.stop_token_ids or (), ignores_eos=self.ignore_eos),
        )
        if (found := sampling_problem(shared, vocab_size)) is not None:
            raise _wrong(found[0], found[1])
        return tuple(
            msgspec.structs.replace(shared, seed=choice_seed(seed, choice)) for choice in range(self.n)
        )

    def _plain(self, max_tokens: int, vocab_size: int) -> EngineSampling:
        """All but what takes a tokenizer."""
        top_k = max(0, self.top_k) if self.top_p > 0 else 1
        return EngineSampling(
            temperature=self.temperature,
            # A nucleus of no mass still holds the likeliest token.
            top_k=min(top_k, vocab_size),
            top_p=1.0 if self.top_p == 0 else self.top_p,
            min_p=self.min_p,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            repetition_penalty=self.repetition_penalty,
            logit_bias=tuple((token, bias) for token, bias in (self.logit_bias or {}).items() if bias),
            allowed_token_ids=tuple(dict.fromkeys(self.allowed_token_ids or ())),
            min_tokens=self.min_tokens,
            max_tokens=max_tokens,
            seed=self.seed or 0,
            stop_token_ids=tuple(dict.fromkeys(self.stop_token_ids or ())),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
        )


def default_params(defaults: GenerationDefaults) -> SamplingParams:
    """The checkpoint's own recommendation (generation_config.json)."""
    found = {name: getattr(defaults, name) for name in defaults.__struct_fields__}
    return SamplingParams(**{name: value for name, value in found.items() if value is not None})


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter (LoRA) to answer with: its name and where it is. `lora_int_id` is vLLM's, and means nothing
    here: an adapter is identified by its content.
    """

    lora_name: str
    lora_int_id: int = 0
    lora_path: str = ""
    """A directory in PEFT's format, `http(s)://` or `s3://`; `#digest=HEX` behind it: it must be that one."""


def _wrong(name: str, why: str) -> InvalidRequest:
    return InvalidRequest(f"Invalid '{name}': {why}.", param=name, code="invalid_value")


def _explained(finding: str) -> InvalidRequest:
    match = _FINDING.match(finding)
    assert match is not None  # The pattern matches any text.
    what = match["what"].replace("`", "")
    return _wrong(match["path"] or "params", what[:1].lower() + what[1:])


def as_params(value: object) -> SamplingParams:
    """One that was given for a call, checked again.

    Raises:
        InvalidRequest: it is none, or holds what it cannot.
    """
    if isinstance(value, Mapping):
        raise _wrong("sampling_params", "expected SamplingParams(...), got a mapping")
    if not isinstance(value, SamplingParams):
        raise _wrong("sampling_params", f"expected SamplingParams, got {type(value).__name__}")
    value.check()
    return value
