"""How well `model: "auto"` chooses, on the labelled requests in bench/data/complexity.jsonl.

    python -m bench.policy.complexity                      # the defaults, on the held-out third
    python -m bench.policy.complexity --part tuning        # the two thirds that weights may be tuned on
    python -m bench.policy.complexity --json docs/results/complexity.json

The labels were set by hand, one request at a time: does it need the large model? Regret is where the choice
and the label differ: `under` needs the large one and got the small one, `over` the other way round. Cost is
relative to giving everything to the large model (and to the small one), at the price ratio and with every
request alike.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.harness import command_line
from penstock.config.routing import AutoModel
from penstock.policy.extras.complexity import ComplexityRouter, Features

DATA = Path(__file__).parents[1] / "data" / "complexity.jsonl"
COST_RATIO = 8.0
UP_TO = 0.195
"""Of a token of the large model to one of the small: the usual gap between a 7B and a 70B model."""


class Labelled(msgspec.Struct, frozen=True):
    """One request: user and assistant take turns, the user begins and ends."""

    id: int
    category: str
    language: str
    large: bool
    turns: list[str]
    tools: int = 0
    tool_results: int = 0

    @property
    def is_held_out(self) -> bool:
        """Every third: never looked at while tuning."""
        return self.id % 3 == 0

    def features(self) -> Features:
        """As the gateway would see it."""
        return Features(
            texts=self.turns[::2],
            num_chars=sum(map(len, self.turns)),
            num_tools=self.tools,
            num_tool_results=self.tool_results,
        )


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """The choices beside the labels."""

    requests: int
    large_needed: int
    small_share: float
    """Of all requests, what the small model got."""
    correct: float
    under: float
    """Of those that need the large model, the share that got the small one."""
    over: float
    """Of those that do not, the share that got the large one."""
    regret: float
    """Of all requests, the share with the wrong model."""
    cost_to_always_large: float
    cost_to_always_small: float
    by_category: dict[str, tuple[int, int, int]]
    """Requests, under, over."""


def load(path: Path = DATA) -> list[Labelled]:
    """The labelled requests."""
    return msgspec.json.decode(b"[" + b",".join(path.read_bytes().splitlines()) + b"]", type=list[Labelled])


def default_router() -> ComplexityRouter:
    """Two models and the default bound between them."""
    return ComplexityRouter((AutoModel(model="small", up_to=UP_TO), AutoModel(model="large")))


def score(router: ComplexityRouter, requests: Sequence[Labelled], cost_ratio: float = COST_RATIO) -> Score:
    """Choose for each request and compare."""
    small = under = over = 0
    by_category: dict[str, tuple[int, int, int]] = {}
    for request in requests:
        choice = router.choose(request.features(), lambda _: True)
        assert choice is not None
        is_small = choice.model == "small"
        wrong_small, wrong_large = is_small and request.large, not is_small and not request.large
        small, under, over = small + is_small, under + wrong_small, over + wrong_large
        num, below, above = by_category.get(request.category, (0, 0, 0))
        by_category[request.category] = (num + 1, below + wrong_small, above + wrong_large)
    num, needed = len(requests), sum(request.large for request in requests)
    cost = small + (num - small) * cost_ratio
    return Score(
        requests=num,
        large_needed=needed,
        small_share=small / num,
        correct=1 - (under + over) / num,
        under=under / max(needed, 1),
        over=over / max(num - needed, 1),
        regret=(under + over) / num,
        cost_to_always_large=cost / (num * cost_ratio),
        cost_to_always_small=cost / num,
        by_category=dict(sorted(by_category.items())),
    )


def microseconds(router: ComplexityRouter, requests: Sequence[Labelled], rounds: int = 5) -> float:
    """CPU time of one choice: the best round's mean."""
    features = [request.features() for request in requests]
    best = float("inf")
    for _ in range(rounds):
        began = time.process_time()
        for each in features:
            router.choose(each, lambda _: True)
        best = min(best, time.process_time() - began)
    return best / len(features) * 1e6


def main() -> None:
    """Print the figures."""
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=("held-out", "tuning", "all"), default="held-out")
    parser.add_argument(
        "--misses", action="store_true", help="show the wrong choices (of the tuning part only)"
    )
    arguments = parser.parse_args()
    requests, router = load(), default_router()
    if arguments.part != "all":
        requests = [request for request in requests if request.is_held_out == (arguments.part == "held-out")]
    found, each_us = score(router, requests), microseconds(router, requests)
    if arguments.misses and arguments.part == "tuning":
        for request in requests:
            choice = router.choose(request.features(), lambda _: True)
            if choice is not None and (choice.model == "large") != request.large:
                label = "needs large" if request.large else "needs small"
                print(f"{label}: {choice.explain()} [{request.category}] {request.turns[-1][:150]!r}")
    print(f"{found.requests} requests ({arguments.part}), {found.large_needed} need the large model")
    print(f"  share to the small model   {found.small_share:6.1%}")
    print(f"  right model                {found.correct:6.1%}   regret {found.regret:.1%}")
    print(f"  large needed, small given  {found.under:6.1%} of those that need the large one")
    print(f"  small enough, large given  {found.over:6.1%} of those that do not")
    print(f"  cost                       {found.cost_to_always_large:6.1%} of always large", end="")
    print(f", {found.cost_to_always_small:.2f}x of always small (price ratio {COST_RATIO:g})")
    print(f"  {each_us:.0f} us of CPU per decision")
    for category, (num, under, over) in found.by_category.items():
        print(f"    {category:10} {num:3}  under {under:2}  over {over:2}")
    if arguments.json:
        figures = {
            "part": arguments.part,
            "cpu_us_per_decision": round(each_us, 1),
            **msgspec.to_builtins(found),
        }
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(figures), indent=2) + b"\n")


if __name__ == "__main__":
    main()
