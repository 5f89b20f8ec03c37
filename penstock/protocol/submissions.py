"""What a worker checks of a submission before its engine sees it.

Gateways check what clients ask for, and say so in the API's words; but a worker listens on a port, and one
number out of range (a NaN, an id that fits no tensor) would end its process and everyone's requests with it.
"""

import math
from collections.abc import Iterator, Sequence

from penstock.types import SamplingParams

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
SCALE_MAX = 1000.0
"""Of temperatures, penalties and biases: far more than any model has a use for."""
STOPS_MAX = 1024
"""Stop tokens of one request, and entries of its bias."""
INPUTS_MAX = 2048
"""Texts of one request for vectors, as at OpenAI."""
INPUTS_TOKENS_MAX = 1 << 20
"""Their tokens: as many texts of 512. A query is in each of its pairs, so a small body can ask for more than
any machine has memory for."""
BATCH_TEXTS_MAX = 32
"""Texts of one request that an engine has in its scheduler at once."""

_FLOATS = {
    "temperature": (0.0, SCALE_MAX),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-SCALE_MAX, SCALE_MAX),
    "frequency_penalty": (-SCALE_MAX, SCALE_MAX),
    "repetition_penalty": (1 / SCALE_MAX, SCALE_MAX),
}


def sampling_problem(sampling: SamplingParams, vocab_size: int) -> tuple[str, str] | None:
    """The first parameter that the engine cannot compute with, and what is wrong with it; None if there is
    none.
    """
    return next(_problems(sampling, vocab_size), None)


def _problems(sampling: SamplingParams, vocab_size: int) -> Iterator[tuple[str, str]]:
    for name, (low, high) in _FLOATS.items():
        value: float = getattr(sampling, name)
        if not low <= value <= high:  # A NaN is in no range.
            yield name, f"{name} is {value:g}, not between {low:g} and {high:g}"
    integers = (
        ("top_k", sampling.top_k, 0, INT32_MAX),
        ("min_tokens", sampling.min_tokens, 0, INT32_MAX),
        ("max_tokens", sampling.max_tokens, 1, INT32_MAX),
        ("seed", sampling.seed, -INT64_MAX - 1, INT64_MAX),
        ("logprobs", sampling.logprobs or 0, 0, vocab_size),
        ("prompt_logprobs", sampling.prompt_logprobs or 0, 0, vocab_size),
    )
    for name, number, low, high in integers:
        if not low <= number <= high:
            yield name, f"{name} is {number}, not between {low} and {high}"
    if len(sampling.stop_token_ids) > STOPS_MAX:
        yield "stop_token_ids", f"stop_token_ids has {len(sampling.stop_token_ids)} entries, over {STOPS_MAX}"
    if any(not 0 <= token_id <= INT32_MAX for token_id in sampling.stop_token_ids):
        yield "stop_token_ids", f"stop_token_ids has ids outside 0..{INT32_MAX}"
    if any(not 0 <= token_id < vocab_size for token_id, _ in sampling.logit_bias):
        yield "logit_bias", f"logit_bias has token ids outside 0..{vocab_size - 1}"
    if any(not abs(bias) <= SCALE_MAX for _, bias in sampling.logit_bias):
        yield "logit_bias", f"logit_bias has a value beyond {SCALE_MAX:g}"
    if any(not word or not 0 <= min(word) <= max(word) < vocab_size for word in sampling.bad_words):
        yield "bad_words", f"bad_words has an empty word, or token ids outside 0..{vocab_size - 1}"
    if (allowed := sampling.allowed_token_ids) and not 0 <= min(allowed) <= max(allowed) < vocab_size:
        yield "allowed_token_ids", f"allowed_token_ids has ids outside 0..{vocab_size - 1}"
    if len({token_id for token_id, _ in sampling.logit_bias}) < len(sampling.logit_bias):
        yield "logit_bias", "logit_bias has a token id twice"


def weight_of(weight: float) -> float:
    """The share of a fairness key that counts: what was said, if it is one."""
    return weight if math.isfinite(weight) and 0 < weight <= SCALE_MAX**2 else 1.0


def inputs_problem(num_tokens: int, lengths: Sequence[int], firsts: Sequence[int]) -> tuple[str, str] | None:
    """The field that does not divide a prompt of so many tokens into texts (`Submit.inputs`), and what is
    wrong with it.
    """
    assert lengths, "a prompt of no texts is asked about nothing"
    if len(lengths) > INPUTS_MAX:
        return "inputs", f"there are {len(lengths)} texts, over {INPUTS_MAX}"
    if num_tokens > INPUTS_TOKENS_MAX:
        return "inputs", f"the texts have {num_tokens} tokens, over {INPUTS_TOKENS_MAX}"
    if min(lengths) < 1 or sum(lengths) != num_tokens:
        return "inputs", f"the texts have {sum(lengths)} tokens, the prompt {num_tokens}"
    if firsts and (len(firsts) != len(lengths) or min(firsts) < 0):
        return "firsts", "the first parts of pairs are not as many as the texts"
    if any(first > length for first, length in zip(firsts, lengths, strict=False)):
        return "firsts", "the first part of a pair is longer than the pair"
    return None
