"""Capacity planning: how many of which accelerator a traffic needs, what a million tokens cost, and how far
from the least.

For every way of placing a model (device, tensor parallelism) the largest steady batch is looked for that
keeps the objective. In a steady state a step with B rows that decode also computes the prompts that replace
those that end:

    prompt tokens per step   c = B p,  p = (1 - hit rate) x prompt / output
    step time                s(B) = roofline(B rows, c prompt tokens, B x mean context)
    rate of a replica        B / s(B) output tokens per second
    bounds                   s(B) <= TPOT,  first token <= TTFT,  B contexts fit 90 % of the KV cache,
                             B <= max_running

The first token takes the prompt's chunks, one step each, and the step that is under way when it comes.
Replicas are then `rate / (replica x load)`, rounded up, and spares: a load of 1 would let queues grow without
bound under Poisson arrivals.

The theoretical least is the same roofline with nothing lost: data-sheet bandwidth and arithmetic, no
overhead, no communication, no objective, every replica full. Nothing gets below it; `times_least` says how
far above the plan is.

The requirement's sizing example (110 accelerators), recomputed line by line, with what is wrong in it.

    1,000 users x 200 tokens = 200,000 tokens/s;
        70B: 40 % / 1,000 per accelerator = 80;  7B: 60 % / 4,000 = 30;  110 together

Two of its steps do not hold: 200,000 is tokens per round, a rate only if every user were sent 200 tokens each
second; and 1,000 tokens/s of a 70B model is the figure of a group of four, by which the example then divides
as if it were of one.
"""

from collections.abc import Callable, Iterable, Sequence
from math import ceil

import msgspec

from penstock.clock import NS_PER_MS, NS_PER_S
from penstock.errors import ConfigError
from penstock.planning.roofline import (
    MODELS,
    Accelerator,
    Efficiency,
    ModelShape,
    Placed,
    Roofline,
    accelerator,
)
from penstock.schedule.step import StepShape
from penstock.types import BLOCK_TOKENS

TP = (1, 2, 4, 8)
OUR_GPU_DTYPES = ("bf16", "fp32")
OUR_CPU_DTYPES = (*OUR_GPU_DTYPES, "int8", "int4")
"""Types of weights that our own engine computes with."""
KV_SHARE = 0.9
"""Of the KV cache, what steady contexts may take: the rest is for prefixes and for how contexts vary."""
IDEAL = Efficiency(memory=1.0, compute=1.0, link=1.0, all_reduce_ns=0)


class TrafficDemand(msgspec.Struct, frozen=True, kw_only=True):
    """The demand on one model."""

    rps: float
    prompt_tokens: int = 1000
    output_tokens: int = 200
    hit_rate: float = 0.0
    """Share of prompt tokens that the prefix cache has."""

    @property
    def tokens_per_s(self) -> float:
        """Output tokens."""
        return self.rps * self.output_tokens

    @property
    def prompt_per_output(self) -> float:
        """Prompt tokens to compute for every output token."""
        return (1 - self.hit_rate) * self.prompt_tokens / self.output_tokens

    @property
    def context(self) -> float:
        """Tokens that a running row has stored, on average over its life."""
        return self.prompt_tokens + self.output_tokens / 2


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """The promises that the plan must keep, and how an engine is run."""

    ttft_ms: float = 500.0
    tpot_ms: float = 50.0
    load: float = 0.8
    """Of a replica's steady rate, what it is given."""
    spare: int = 1
    """Replicas of each model that may be lost without losing the objective."""
    max_running: int = 256
    step_tokens: int = 2048


class Option(msgspec.Struct, frozen=True, kw_only=True):
    """One way of serving one model."""

    model: str
    device: str
    tp: int
    dtype: str
    batch: int
    """Rows of a steady step."""
    step_ms: float
    ttft_ms: float
    """Predicted, without queueing."""
    bound: str
    """The bound that keeps the batch from growing: "TPOT", "TTFT", "KV cache" or "max_running"."""
    replica_tps: float
    """Output tokens per second of a full replica."""
    replicas: int
    devices: int
    price_per_hour: float
    """Of all of them."""
    cost_per_million: float
    """Per million output tokens that the traffic asks for."""
    least_per_million: float
    """The theoretical least on this device."""
    lacks: tuple[str, ...] = ()
    """The features that our own engine would need for it and does not have, in words; vLLM's has it."""

    @property
    def times_least(self) -> float:
        """How far above the least; the requirement's mark is 2."""
        return self.cost_per_million / self.least_per_million


def options(
    model: ModelShape, demand: TrafficDemand, terms: Terms, devices: Iterable[Accelerator], *,
    dtype: str = "bf16", tps: Sequence[int] = TP,
) -> list[Option]:  # fmt: skip
    """Every way that keeps the terms, cheapest first; of two that cost the same the one with fewer
    devices.
    """
    found: list[Option] = []
    for device in devices:
        for tp in tps:
            if model.num_heads % tp:
                continue
            option = _option(Placed(model=model, device=device, tp=tp, dtype=dtype), demand, terms)
            if option is not None:
                found.append(option)
    return sorted(found, key=lambda each: (each.price_per_hour, each.devices, each.device, each.tp))


def cheapest(
    model: ModelShape,
    demand: TrafficDemand,
    terms: Terms,
    devices: Sequence[Accelerator],
    *,
    dtype: str = "bf16",
) -> Option:
    """The best of `options`.

    Raises:
        ConfigError: no placement keeps the terms; the message says what came nearest.
    """
    if found := options(model, demand, terms, devices, dtype=dtype):
        return found[0]
    nearest = [
        Roofline(placed).step_ns(_step(1, demand)) / NS_PER_MS
        for device in devices
        for tp in TP
        if model.num_heads % tp == 0
        and _fits(placed := Placed(model=model, device=device, tp=tp, dtype=dtype))
    ]
    names = ", ".join(device.name for device in devices)
    why = (
        f"a single row takes {min(nearest):.1f} ms per token"
        if nearest
        else "its weights do not fit 8 of them"
    )
    raise ConfigError(
        f"{model.name} in {dtype} on {names}: nothing keeps TTFT {terms.ttft_ms:g} ms and TPOT "
        f"{terms.tpot_ms:g} ms ({why})"
    )


def _fits(placed: Placed) -> bool:
    try:
        return placed.num_blocks > 0
    except ConfigError:
        return False


def _option(placed: Placed, demand: TrafficDemand, terms: Terms) -> Option | None:
    if not _fits(placed):
        return None
    law = Roofline(placed)
    rows_kv = int(placed.num_blocks * BLOCK_TOKENS * KV_SHARE / (demand.prompt_tokens + demand.output_tokens))
    limit = min(rows_kv, terms.max_running)

    def refused(batch: int) -> str:
        """The bound that a batch breaks; empty if it keeps all."""
        step_ms = law.step_ns(_step(batch, demand)) / NS_PER_MS
        if step_ms > terms.tpot_ms:
            return "TPOT"
        return "TTFT" if _ttft_ms(law, batch, demand, terms) > terms.ttft_ms else ""

    batch, bound = _largest(limit, refused)
    if batch < 1:
        return None
    bound = bound or ("KV cache" if rows_kv <= terms.max_running else "max_running")
    step_ns = law.step_ns(_step(batch, demand))
    rate = batch * NS_PER_S / step_ns
    replicas = max(1, ceil(demand.tokens_per_s / (rate * terms.load) - 1e-9)) + terms.spare
    price = replicas * placed.price_per_hour
    return Option(
        model=placed.model.name, device=placed.device.name, tp=placed.tp, dtype=placed.dtype, batch=batch,
        step_ms=step_ns / NS_PER_MS, ttft_ms=_ttft_ms(law, batch, demand, terms), bound=bound,
        replica_tps=rate, replicas=replicas, devices=replicas * placed.tp, price_per_hour=price,
        cost_per_million=price / 3600 / demand.tokens_per_s * 1e6, least_per_million=least(placed, demand),
        lacks=_lacks(placed),
    )  # fmt: skip


def _lacks(placed: Placed) -> tuple[str, ...]:
    """The features of this that our own engine does not have: it runs a model on one device, and rounds
    weights on CPUs alone.
    """
    found = ["tensor parallelism (several devices for one replica)"] if placed.tp > 1 else []
    is_cpu = placed.device.name.startswith("cpu")
    if placed.dtype not in (OUR_CPU_DTYPES if is_cpu else OUR_GPU_DTYPES):
        found.append(f"{placed.dtype} weights on {'a CPU' if is_cpu else 'a GPU'}")
    return tuple(found)


def least(placed: Placed, demand: TrafficDemand) -> float:
    """The least that a million output tokens can cost on this placement: see the module."""
    law = Roofline(placed, IDEAL)
    rows = max(1, int(placed.num_blocks * BLOCK_TOKENS / demand.context))
    memory, compute, _ = law.parts_ns(_step(rows, demand))
    rate = rows * NS_PER_S / max(memory, compute)
    return placed.price_per_hour / 3600 / rate * 1e6


def _largest(limit: int, refused: Callable[[int], str]) -> tuple[int, str]:
    """The largest batch up to `limit` that is not refused, and what refuses the next: costs only grow with
    the batch.
    """
    low, high, why = 0, limit + 1, ""
    while high - low > 1:
        middle = (low + high) // 2
        if reason := refused(middle):
            high, why = middle, reason
        else:
            low = middle
    return low, why


def _step(batch: int, demand: TrafficDemand) -> StepShape:
    """A steady step: `batch` rows decode while the prompts of those that follow them are computed."""
    prompts = batch * demand.prompt_per_output
    rows = ceil(prompts / max(1.0, (1 - demand.hit_rate) * demand.prompt_tokens)) if prompts else 0
    before = demand.prompt_tokens * (1 + demand.hit_rate) / 2  # Of a prompt's token, on average.
    return StepShape(
        batch, rows, ceil(prompts), round(batch * demand.context + rows * before), round(prompts * before)
    )


def _ttft_ms(law: Roofline, batch: int, demand: TrafficDemand, terms: Terms) -> float:
    """The step under way, then the prompt's chunks, each beside the rows that decode."""
    own = max(1, round((1 - demand.hit_rate) * demand.prompt_tokens))
    chunk = max(1, terms.step_tokens - batch)
    total = law.step_ns(_step(batch, demand)) / 2
    done = demand.prompt_tokens - own
    while own > 0:
        tokens = min(own, chunk)
        pairs = tokens * done + tokens * (tokens + 1) // 2
        total += law.step_ns(
            StepShape(batch, 1, tokens, round(batch * demand.context) + done + tokens, pairs)
        )
        own, done = own - tokens, done + tokens
    return total / NS_PER_MS


USERS, ANSWER_TOKENS = 1000, 200
THINK_S = 20.0
"""A user reads and thinks for so long between two rounds."""
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
    """The planner's estimate of the corrected rate."""


def sizing_example(terms: Terms, *, prompt_tokens: int = 1000, device: Accelerator | None = None) -> Sizing:
    """Redo the example for prompts of that length and users who read and think for `THINK_S` between two
    rounds.
    """
    device = device or accelerator("a100-80")
    written = float(USERS * ANSWER_TOKENS)
    at_pace = USERS * 1000 / terms.tpot_ms
    round_s = terms.ttft_ms / 1000 + ANSWER_TOKENS * terms.tpot_ms / 1000
    with_pauses = written / (round_s + THINK_S)
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
            f"users who think {THINK_S:g} s between rounds", with_pauses, per_group=True,
            note=f"{USERS} x {ANSWER_TOKENS} / ({round_s:.1f} s answer + {THINK_S:g} s)",
        ),
    ]  # fmt: skip
    chosen: list[Option] = []
    for name, share, _, _ in SHARES:
        demand = TrafficDemand(
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
