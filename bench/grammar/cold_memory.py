"""The grammar library's calls for one token of a string, with its memory in the caches and without.

    python -m bench.grammar.cold_memory [MODEL_DIR] [--rounds 90] [--rows 32] [--shape 28m] [--json FILE]

Between two tokens an engine reads all its weights, which push everything else out of the caches. Here so many
bytes as a step of the 28M shape reads, and then some, are read before each round of `--rows` matchers, or
nothing is. Microseconds per row, medians of the rounds: taking a drawn token (`try_consume_tokens`), asking
what is forced behind it (`compute_ff_tokens`), and computing a mask. Each of two strings: at least 400
characters long, where every length is a state of the lexer's own, and of any length, where rows share one.
"""

import statistics
import time
from pathlib import Path

import msgspec
import numpy as np
from llguidance import LLMatcher

from bench.grammar.cost import DEMO
from bench.harness import command_line, write_result
from bench.peers.engines import OUT
from bench.peers.shapes import SHAPES, make_model
from penstock.engine.grammar.compiler import GrammarTokens, compile_grammar
from penstock.models.registry import read_spec
from penstock.protocol.worker_parts import Grammar
from penstock.rng import stream

STRINGS = {"at least 400 characters": '"[^"\\\\]{400,}"', "any length": '"[^"\\\\]*\\x00'}
READ_BYTES = 80 << 20


def timed(matchers: list[LLMatcher], draws: list[int], bits: np.ndarray) -> tuple[float, float, float]:
    """Seconds of all rows: taking a token, asking what follows, and one mask."""
    times = [time.perf_counter()]
    for matcher, token_id in zip(matchers, draws, strict=True):
        assert matcher.try_consume_tokens([token_id]), "it was asked before"
    times.append(time.perf_counter())
    for matcher in matchers:
        matcher.compute_ff_tokens()
    times.append(time.perf_counter())
    matchers[0].unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
    times.append(time.perf_counter())
    taking, asking, masking = np.diff(times).tolist()
    return taking, asking, masking


def measure(tokens: GrammarTokens, pattern: str, *, cold: bool, rounds: int, rows: int) -> dict[str, float]:
    """Medians in microseconds: per row, and of one mask."""
    form = msgspec.json.encode({"regex": pattern})
    first = compile_grammar(Grammar(form=form), tokens).first
    matchers = [first.deep_copy() for _ in range(rows)]
    (opening,) = tokens.tokenizer.encode('"')
    for matcher in matchers:
        assert matcher.consume_token(opening), pattern
    rng, num_words = stream(1, pattern), -(-tokens.vocab_size // 32)
    bits, weights = np.zeros(num_words, np.int32), np.ones(READ_BYTES, np.uint8)
    found: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        draws = list[int]()
        for matcher in matchers:
            token_id = rng.randrange(300, tokens.vocab_size)
            while matcher.validate_tokens([token_id]) == 0:
                token_id = rng.randrange(300, tokens.vocab_size)
            draws.append(token_id)
        if cold:
            weights.sum()
        found.append(timed(matchers, draws, bits))
    taking, asking, masking = (statistics.median(each) * 1e6 for each in zip(*found, strict=True))
    return {"take": round(taking / rows, 2), "forced": round(asking / rows, 2), "mask": round(masking, 1)}


def main() -> None:
    parser = command_line(__doc__, rounds=90)
    parser.add_argument("model", type=Path, nargs="?", default=DEMO)
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--rows", type=int, default=32)
    args = parser.parse_args()
    if args.shape:
        args.model = make_model(SHAPES[args.shape], OUT / "models" / args.shape)
    tokens = GrammarTokens.load(args.model, read_spec(args.model)[0].vocab_size)
    assert tokens is not None, "its tokenizer is one that the library reads"
    report = {
        name: {
            state: measure(tokens, pattern, cold=state == "cold", rounds=args.rounds, rows=args.rows)
            for state in ("warm", "cold")
        }
        for name, pattern in STRINGS.items()
    }
    for name, each in report.items():
        print(f"{name:24}", each)
    write_result(args.json, {"rows": args.rows, "read_bytes": READ_BYTES, "strings": report})


if __name__ == "__main__":
    main()
