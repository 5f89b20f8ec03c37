"""What pinning the native kernels' threads to cores is worth: decoding with `engine.pin_threads` on and off, in turns.

    python bench/pinned_threads.py MODEL_DIR [--batch 1 8] [--tokens 64] [--rounds 9] [--json FILE]

Two processes hold the same model, since threads are a process's, and answer the same prompts one after the other; the one
that waits sleeps. The figure is on / off of each round: its median and its range. The thread that calls the kernels
computes too and is never pinned: it also schedules, samples and takes mail.
"""

import argparse
import multiprocessing
import statistics
from multiprocessing.connection import Connection
from pathlib import Path

from overlap import CLOCK, tokens_per_s
from provenance import add_json_option, write_result

from penstock.config.tree import EngineConfig
from penstock.engine.core import build_core
from penstock.engine.runner import build_runner


def serve(link: Connection, path: Path, *, pinned: bool) -> None:
    """Hold an engine, and answer (batch, tokens, round) with tokens per second until None comes."""
    config = EngineConfig(
        device="cpu", kernels="native", prefix_cache=False, kv_memory_bytes=256 << 20, pin_threads=pinned
    )
    runner = build_runner(path, config, CLOCK, lambda _stage, _done, _total: None)
    runner.warm_up()
    core = build_core(runner, config, b"bench" * 8, CLOCK)
    link.send("ready")
    while (asked := link.recv()) is not None:
        link.send(tokens_per_s(core, *asked))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=9)
    add_json_option(parser)
    args = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    links: dict[str, Connection] = {}
    for name in ("off", "on"):
        links[name], other = context.Pipe()
        context.Process(
            target=serve, args=(other, args.model), kwargs={"pinned": name == "on"}, daemon=True
        ).start()
    for link in links.values():
        link.recv()
    found: list[dict[str, object]] = []
    print(f"{'batch':>5} {'off tok/s':>10} {'on tok/s':>10} {'on / off':>9} {'min':>6} {'max':>6}")
    for batch in args.batch:
        rates: dict[str, list[float]] = {name: [] for name in links}
        for round_ in range(args.rounds + 1):  # The first one warms up.
            for name in list(links) if round_ % 2 else reversed(links):
                links[name].send((batch, args.tokens, round_))
                rates[name].append(links[name].recv())
        ratios = [on / off for on, off in zip(rates["on"][1:], rates["off"][1:], strict=True)]
        middles = {name: statistics.median(each[1:]) for name, each in rates.items()}
        middle = statistics.median(ratios)
        found.append(
            {
                "batch": batch,
                **{f"{n}_tok_s": r for n, r in middles.items()},
                "on_over_off": ratios,
                "median": middle,
            }
        )
        print(
            f"{batch:>5} {middles['off']:>10.1f} {middles['on']:>10.1f} {middle:>9.3f} {min(ratios):>6.3f} {max(ratios):>6.3f}",
            flush=True,
        )
    for link in links.values():
        link.send(None)
    write_result(args.json, {"model": args.model.name, "tokens": args.tokens, "by_batch": found})


if __name__ == "__main__":
    main()
