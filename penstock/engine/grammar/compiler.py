"""Compiling grammars: on threads, within bounds, and once for each tenant that asks for the same.

A compiled grammar is a matcher in its first state, which every answer gets a copy of. Tenants share nothing:
whether another one uses a schema cannot be learned from how long it takes. They take turns: one tenant's slow
schemas delay another's by those that are being compiled, and by no more.
"""

import hashlib
import json
import logging
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from llguidance import LLMatcher, LLTokenizer

from penstock.engine.grammar.source import grammar_text, limits, refuse_words
from penstock.engine.grammar.trial import SchemaTrials
from penstock.errors import CheckpointError, InvalidRequest
from penstock.protocol.worker_parts import Grammar
from penstock.text.tokenizer import Tokenizer, read_text

CACHED_MAX = 256
"""Compiled grammars, and refusals, that are kept, of all tenants."""
CACHED_PER_TENANT_MAX = 64
COMPILE_THREADS = 2
ANYTHING = b'{"regex": "(?s:.*)"}'

_log = logging.getLogger(__name__)


@dataclass(slots=True, frozen=True)
class GrammarTokens:
    """A model's vocabulary as grammars see it."""

    library: LLTokenizer
    tokenizer: Tokenizer
    eos_ids: tuple[int, ...]
    vocab_size: int

    @classmethod
    def load(cls, model_dir: Path, vocab_size: int) -> "GrammarTokens | None":
        """The vocabulary of the checkpoint in `model_dir`, whose logits have `vocab_size` entries.

        None if grammars are not possible with it, which is logged: no tokenizer, none whose tokens are plain
        bytes, or one that llguidance reads otherwise than we do.
        """
        try:
            tokenizer = Tokenizer.load(model_dir)
            text = read_text(model_dir / "tokenizer.json")
        except (CheckpointError, OSError, UnicodeDecodeError) as error:
            _log.info("no structured output: %s", error)
            return None
        known, eos_ids = tokenizer.vocab_size, [i for i in tokenizer.eos_ids if 0 <= i < vocab_size]
        if tokenizer.decoding is None or known > vocab_size or not eos_ids:
            _log.info("no structured output: this tokenizer's tokens are not plain bytes, or it has no EOS")
            return None
        try:
            library = LLTokenizer(text, n_vocab=vocab_size, eos_token=eos_ids)
        except ValueError as error:
            _log.warning("no structured output: llguidance cannot read the tokenizer: %s", error)
            return None
        # llguidance keeps the byte that no UTF-8 has for itself.
        ours = b"".join(map(tokenizer.token_bytes, range(known))).replace(b"\xff", b"")
        if library.decode_bytes(list(range(known))) != ours:
            _log.warning("no structured output: llguidance reads this tokenizer's tokens differently")
            return None
        return cls(library, tokenizer, tuple(eos_ids), vocab_size)

    def mark(self, text: str) -> str:
        """The grammar of a mark: its text, or its token if it has one of its own."""
        ids = self.tokenizer.encode(text)
        return f"({json.dumps(text)} | <[{ids[0]}]>)" if len(ids) == 1 else json.dumps(text)


@dataclass(slots=True, frozen=True)
class CompiledGrammar:
    """A grammar, ready to be followed by any number of answers."""

    first: LLMatcher
    """In its first state. Never to be changed: answers follow copies."""
    tokens: GrammarTokens = field(repr=False)
    is_empty: bool = False
    """It allows anything: only the reasoning in front of it is bounded."""
    opening: bytes = b""
    opening_ids: tuple[int, ...] = ()
    """See `Grammar.opens_with`."""
    marker: bytes = b""
    marker_ids: tuple[int, ...] = ()
    """See `Grammar.begins_after`."""
    begins_within: int | None = None
    """See `Grammar.begins_within`. Compiling does not depend on it: the compiler leaves it to `bounded`."""
    call_mark: re.Pattern[bytes] | None = None
    ends_with_calls: bool = False
    is_optional: bool = False

    def bounded(self, grammar: Grammar) -> "CompiledGrammar":
        """The same, with the bound on the reasoning that a request has."""
        return self if grammar.begins_within is None else replace(self, begins_within=grammar.begins_within)

    @property
    def binds_all(self) -> bool:
        """Whether the grammar holds from the end of the reasoning to the end of the answer."""
        return not (self.is_empty or self.call_mark)

    @property
    def may_end_before(self) -> bool:
        """Whether the answer may end within the reasoning."""
        return not self.binds_all


_Key = tuple[bytes, bytes]
"""A tenant, and the digest of what is compiled of a grammar: all but the bound on the reasoning, which
differs from request to request."""


class _Job:
    """A grammar that requests of one tenant wait for."""

    __slots__ = ("future", "grammar", "num_asked")

    def __init__(self, grammar: Grammar) -> None:
        self.grammar = grammar
        self.future: Future[CompiledGrammar] = Future()
        self.num_asked = 0


class GrammarCompiler:
    """Compiles what requests ask for. Thread-safe."""

    def __init__(self, tokens: GrammarTokens) -> None:
        self.tokens = tokens
        self._trials = SchemaTrials()
        self._threads = ThreadPoolExecutor(COMPILE_THREADS, thread_name_prefix="grammar-compile")
        self._lock = threading.Lock()
        """Held for the fields below."""
        self._cache: OrderedDict[_Key, CompiledGrammar | InvalidRequest] = OrderedDict()
        self._jobs: dict[_Key, _Job] = {}
        """Those that wait, and those that are being compiled."""
        self._lines: OrderedDict[bytes, OrderedDict[_Key, _Job]] = OrderedDict()
        """Those that wait, by tenant; the first tenant is next."""

    def cached(self, tenant: bytes, grammar: Grammar) -> CompiledGrammar | InvalidRequest | None:
        """The result of the tenant's earlier request for it, if that is still there. Each request takes
        `bounded` of it.
        """
        key = _key(tenant, grammar)
        with self._lock:
            if (found := self._cache.get(key)) is not None:
                self._cache.move_to_end(key)
            return found

    def compile(self, tenant: bytes, grammar: Grammar) -> "Future[CompiledGrammar]":
        """Compile on a thread; each request takes `bounded` of it. `InvalidRequest` says what cannot be; any
        other error is not the request's.
        """
        key = _key(tenant, grammar)
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                job = self._jobs[key] = _Job(msgspec.structs.replace(grammar, begins_within=None))
                self._lines.setdefault(tenant, OrderedDict())[key] = job
                self._threads.submit(self._compile_next)
            job.num_asked += 1
            return job.future

    def cancel(self, tenant: bytes, grammar: Grammar) -> None:
        """A request that waits for it is gone. A grammar that no request waits for is not begun."""
        key = _key(tenant, grammar)
        with self._lock:
            job, line = self._jobs.get(key), self._lines.get(tenant)
            if job is None:
                return
            job.num_asked -= 1
            if job.num_asked or line is None or key not in line:
                return
            del self._jobs[key], line[key]
            if not line:
                del self._lines[tenant]
        job.future.cancel()

    @property
    def trial_pid(self) -> int:
        """The process that tries grammars."""
        return self._trials.pid

    def close(self) -> None:
        """End the threads and the process that tries grammars; what waits is not compiled."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._trials.close()

    def _compile_next(self) -> None:
        with self._lock:
            if not self._lines:
                return  # It was cancelled.
            tenant, line = next(iter(self._lines.items()))
            key, job = line.popitem(last=False)
            if line:
                self._lines.move_to_end(tenant)
            else:
                del self._lines[tenant]
        made: CompiledGrammar | BaseException
        try:
            made = self._compile(job.grammar)
        except BaseException as error:  # noqa: BLE001 The library's panics are no exceptions.
            made = error
        with self._lock:
            del self._jobs[key]
            if isinstance(made, CompiledGrammar | InvalidRequest):
                self._keep(key, made)
        if isinstance(made, CompiledGrammar):
            job.future.set_result(made)
        else:
            job.future.set_exception(made)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            if grammar.form:
                self._trials.check(grammar.form)
            return compile_grammar(grammar, self.tokens)
        except InvalidRequest as error:
            if not grammar.is_optional:
                raise _named(error) from None
        without = msgspec.structs.replace(grammar, form=b"", call_mark="")
        return compile_grammar(without, self.tokens)

    def _keep(self, key: _Key, made: CompiledGrammar | InvalidRequest) -> None:
        self._cache[key] = made
        mine = [each for each in self._cache if each[0] == key[0]]
        if len(mine) > CACHED_PER_TENANT_MAX:
            del self._cache[mine[0]]
        if len(self._cache) > CACHED_MAX:
            self._cache.popitem(last=False)


def compile_grammar(grammar: Grammar, tokens: GrammarTokens) -> CompiledGrammar:
    """Compile a grammar, which was tried. Any thread.

    Raises:
        InvalidRequest: it cannot be enforced; `param` is "grammar", or "grammar." and the keyword.
    """
    try:
        text, schema = grammar_text(grammar.form or ANYTHING, tokens.mark)
        first = LLMatcher(tokens.library, text, log_level=0, limits=limits())
        if first.is_error():
            refuse_words(first.get_error(), schema)
        first.compute_bitmask()  # The mask that the first answer would have to compute.
        if first.is_error():
            refuse_words(first.get_error(), schema)
        if first.is_stopped() and not first.is_accepting():
            raise InvalidRequest("nothing matches it")
    except InvalidRequest as error:
        raise _named(error) from None
    encode = tokens.tokenizer.encode
    return CompiledGrammar(
        first,
        tokens,
        is_empty=not grammar.form,
        opening=grammar.opens_with.encode(),
        opening_ids=encode(grammar.opens_with) if grammar.opens_with else (),
        marker=grammar.begins_after.encode(),
        marker_ids=encode(grammar.begins_after) if grammar.begins_after else (),
        begins_within=grammar.begins_within,
        call_mark=re.compile(grammar.call_mark.encode()) if grammar.call_mark else None,
        ends_with_calls=grammar.ends_with_calls,
        is_optional=grammar.is_optional,
    )


def _named(error: InvalidRequest) -> InvalidRequest:
    """The error with the field of `Submit` that it is about."""
    if (error.param or "").startswith("grammar"):
        return error
    return InvalidRequest(str(error), param=f"grammar.{error.param}" if error.param else "grammar")


def _key(tenant: bytes, grammar: Grammar) -> _Key:
    compiled = msgspec.structs.replace(grammar, begins_within=None)
    return tenant, hashlib.blake2b(msgspec.msgpack.encode(compiled), digest_size=16).digest()


def eos_bits(eos_ids: Sequence[int], num_words: int) -> "list[int]":
    """The words of a mask in which just these tokens' bits are set."""
    words = [0] * num_words
    for token_id in eos_ids:
        words[token_id // 32] |= 1 << token_id % 32
    return words
