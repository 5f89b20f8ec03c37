"""The requirement's sizing example (110 accelerators), recomputed line by line, with what is wrong in it.

    1,000 users x 200 tokens = 200,000 tokens/s;
        70B: 40 % / 1,000 per accelerator = 80;  7B: 60 % / 4,000 = 30;  110 together

Two of its steps do not hold: 200,000 is tokens per round, a rate only if every user were sent 200 tokens each
second; and 1,000 tokens/s of a 70B model is the figure of a group of four, by which the example then divides
as if it were of one.
"""

from collections.abc import Sequence

import msgspec

from penstock.planning.accelerators import Accelerator, accelerator
from penstock.planning.model_shapes import MODELS
from penstock.planning.plan import Demand, Option, Terms, cheapest

USERS, ANSWER_TOKENS = 1000, 200
SHARES = (("70b", 0.4, 1000.0, 4), ("7b", 0.6, 4000.0, 1))
"""(model, share of the tokens, tokens per second that the example says, devices that this figure is of)."""


class SizingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One reading of the example."""

    words: str
    tokens_per_s: float
    devices: float
    arithmetic: str


class Sizing(msgspec.Struct, frozen=True, kw_only=True):
    """The example and its corrections."""

    lines: Sequence[SizingLine]
    chosen: Sequence[Option]
    """What the planner takes for the corrected rate."""


def sizing_example(
    terms: Terms, *, prompt_tokens: int = 1000, think_s: float = 20.0, device: Accelerator | None = None
) -> Sizing:
    """Redo the example for prompts of that length and users who read and think for `think_s` between two
    rounds.
    """
    device = device or accelerator("a100-80")
    written = float(USERS * ANSWER_TOKENS)
    at_pace = USERS * 1000 / terms.tpot_ms
    round_s = terms.ttft_ms / 1000 + ANSWER_TOKENS * terms.tpot_ms / 1000
    with_pauses = written / (round_s + think_s)
    lines = [
        _line("as written", written, per_group=False, note=f"{USERS} x {ANSWER_TOKENS} tokens taken for a "
        f"rate"),
        _line("and 1,000 tokens/s counted as the group's of four", written, per_group=True,
            note="the same rate"),
        _line(
            f"all {USERS} streams at the promised pace", at_pace, per_group=True,
            note=f"{USERS} / {terms.tpot_ms:g} ms per token",
        ),
        _line(
            f"users who think {think_s:g} s between rounds", with_pauses, per_group=True,
            note=f"{USERS} x {ANSWER_TOKENS} / ({round_s:.1f} s answer + {think_s:g} s)",
        ),
    ]  # fmt: skip
    chosen: list[Option] = []
    for name, share, _, _ in SHARES:
        demand = Demand(
            rps=at_pace * share / ANSWER_TOKENS, prompt_tokens=prompt_tokens, output_tokens=ANSWER_TOKENS
        )
        chosen.append(cheapest(MODELS[name], demand, terms, [device]))
    parts = " + ".join(f"{each.replicas} x {each.tp} ({each.model})" for each in chosen)
    total = sum(each.devices for each in chosen)
    lines.append(
        SizingLine(
            words=f"the same, by the roofline on {device.name}, prompts of {prompt_tokens}, spares included",
            tokens_per_s=at_pace, devices=total, arithmetic=f"{parts} = {total}",
        )
    )  # fmt: skip
    return Sizing(lines=lines, chosen=chosen)


def _line(words: str, rate: float, *, per_group: bool, note: str) -> SizingLine:
    parts, total = list[str](), 0.0
    for name, share, each, group in SHARES:
        devices = rate * share / each * (group if per_group else 1)
        times = f" x {group}" if per_group and group > 1 else ""
        parts.append(f"{name}: {rate * share:,.0f} / {each:,.0f}{times} = {devices:,.0f}")
        total += devices
    return SizingLine(words=words, tokens_per_s=rate, devices=total, arithmetic=f"{note}; {'; '.join(parts)}")
