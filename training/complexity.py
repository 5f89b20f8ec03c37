"""How well `model: "auto"` chooses, on the labelled requests in training/complexity.jsonl.

    python -m training.complexity [--part held-out|tuning|all] [--misses] [--json FILE]

The labels were set by hand, one request at a time: does it need the large model? Weights may be tuned on two
thirds (`--misses` shows what they get wrong there), the figures are of the other one. `under` needs the large
model and got the small one, `over` the other way round. Cost is relative to giving everything to the large
model, at the price ratio and with every request alike.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.harness import command_line, table, write_result
from penstock.config.routing import AutoModel
from penstock.policy.extras.complexity import ComplexityRouter, Features

DATA = Path(__file__).with_suffix(".jsonl")
COST_RATIO = 8.0
"""Of a token of the large model to one of the small: the usual gap between a 7B and a 70B model."""
ROUTER = ComplexityRouter((AutoModel(model="small", up_to=0.195), AutoModel(model="large")))
"""Two models and the default bound between them."""
PARTS = {"held-out": (0,), "tuning": (1, 2), "all": (0, 1, 2)}
"""By the remainder of a request's number."""


class Labelled(msgspec.Struct, frozen=True):
    """One request: user and assistant take turns, the user begins and ends."""

    id: int
    category: str
    language: str
    large: bool
    turns: list[str]
    tools: int = 0
    tool_results: int = 0

    def features(self) -> Features:
        """As the gateway would see it."""
        return Features(
            texts=self.turns[::2], num_chars=sum(map(len, self.turns)), num_tools=self.tools,
            num_tool_results=self.tool_results,
        )  # fmt: skip


def load(part: str, path: Path = DATA) -> list[Labelled]:
    """The labelled requests."""
    lines = path.read_bytes().splitlines()
    found = msgspec.json.decode(b"[" + b",".join(lines) + b"]", type=list[Labelled])
    return [each for each in found if each.id % 3 in PARTS[part]]


def score(requests: Sequence[Labelled], *, shows_misses: bool = False) -> dict[str, float]:
    """The choices beside the labels, as shares."""
    counted: Counter[str] = Counter()
    for request in requests:
        choice = ROUTER.choose(request.features(), lambda _: True)
        assert choice is not None
        is_large = choice.model == "large"
        counted["large"] += is_large
        counted["needed"] += request.large
        counted["under"] += request.large and not is_large
        counted["over"] += is_large and not request.large
        if shows_misses and is_large != request.large:
            print(
                f"large {request.large}: {choice.explain()} [{request.category}] {request.turns[-1][:150]!r}"
            )
    num, needed, wrong = len(requests), counted["needed"], counted["under"] + counted["over"]
    return {
        "requests": num,
        "large_needed": needed,
        "small_share": 1 - counted["large"] / num,
        "regret": wrong / num,
        "under": counted["under"] / max(needed, 1),
        "over": counted["over"] / max(num - needed, 1),
        "cost_to_always_large": (counted["large"] * (COST_RATIO - 1) + num) / (num * COST_RATIO),
    }


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--part", choices=PARTS, default="held-out")
    parser.add_argument("--misses", action="store_true", help="show the wrong choices of the tuning part")
    args = parser.parse_args()
    found = score(load(args.part), shows_misses=args.misses and args.part == "tuning")
    print(table((args.part, ""), [(name, f"{value:.4g}") for name, value in found.items()]))
    write_result(args.json, {"part": args.part, **found})


if __name__ == "__main__":
    main()
