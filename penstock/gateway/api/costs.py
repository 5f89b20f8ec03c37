"""`GET /admin/costs`: what requests cost their senders and machines their operator, as `penstock usage` does.

Both are read from the ledger's directory, so they are of all gateway processes and servers that share it and
outlive a restart. A look reads a database: it happens in a thread, one at a time, and its answer is kept for
`FRESH_S`.
"""

import asyncio
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.clock import NS_PER_S
from penstock.config.tree import Config
from penstock.errors import InvalidRequest, LedgerError
from penstock.gateway.api.inspect import answer, query_of, whole_number
from penstock.gateway.api.services import Services
from penstock.gateway.http.exchange import Exchange
from penstock.gateway.identity.tenants import Caller
from penstock.telemetry.costs import COSTS_DIRECTORY, CostAccount, cost_rows, read_days
from penstock.telemetry.ledger_recovery import LedgerReader, LedgerRow, Query, Totals, total_of
from penstock.telemetry.ledger_segment import database_path, ledger_directory

GROUPS = ("tenant", "model", "adapter", "day")
DAYS, DAYS_MAX = 7, 92
LISTED_MAX = 500
"""Lines of one answer."""
FRESH_S = 5
KEPT_MAX = 16
"""Answers that are kept."""
DAY_S = 86_400
PER = 1_000_000


class UsageLine(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's, model's, adapter's or day's requests. Money is in millionths."""

    name: str
    requests: int
    failed: int
    """Of these, those that failed, were cancelled or dropped from the queue."""
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    cost_micros: int
    """By the price list."""
    accelerator_cost_micros: int
    """The cost of their part of the machines' time."""
    per_million_micros: int | None
    """The same for a million tokens of prompts and answers."""


class MachineLine(msgspec.Struct, frozen=True, kw_only=True):
    """One model's, or day's, machines: the whole bill, in units of the currency."""

    name: str
    account: CostAccount


class CostsReport(msgspec.Struct, frozen=True, kw_only=True):
    """`GET /admin/costs`."""

    by: str
    since: str
    """The first UTC day of it: "2026-11-21"."""
    currency: str
    is_priced: bool
    """There is a price list; without one requests cost nothing."""
    usage: list[UsageLine]
    """The dearest first; days, the latest."""
    num_lines: int
    """How many there are; `usage` has at most 500."""
    total: UsageLine
    machines: list[MachineLine]
    """By model, or by day where that is asked for; empty without `prices.accelerators`."""
    machines_total: CostAccount | None


class CostsAdmin:
    """The endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._one_at_a_time = asyncio.Lock()
        self._kept: dict[tuple[str, int], tuple[int, CostsReport]] = {}
        """By question, with the second until which it is fresh."""

    async def costs(self, exchange: Exchange, caller: Caller) -> None:
        """`GET /admin/costs?by=tenant&days=7`: what requests cost by `tenant`, `model`, `adapter` or `day`,
        where the machines' money went, and a million tokens beside its floor, of the last UTC days, today
        included (92 at most).

        Raises:
            InvalidRequest: the query says something else, or this server keeps no ledger.
        """
        query, config = query_of(exchange), self._services.config
        by = query.get("by", GROUPS[0])
        if by not in GROUPS:
            message = f"Invalid value for 'by': expected one of {', '.join(GROUPS)}."
            raise InvalidRequest(message, param="by", code="invalid_value")
        days = whole_number(query, "days", DAYS, minimum=1, maximum=DAYS_MAX)
        if not config.ledger.enabled:
            raise InvalidRequest("This server keeps no ledger: ledger.enabled is false.", code="no_ledger")
        async with self._one_at_a_time:
            now_s = self._services.clock.wall_ns() // NS_PER_S
            until_s, report = self._kept.get((by, days), (0, None))
            if report is None or now_s >= until_s:
                try:
                    report = await asyncio.to_thread(read_costs, config, by, now_s, days)
                except LedgerError as error:
                    raise InvalidRequest(f"{error}.", code="no_ledger") from error
                self._kept[by, days] = now_s + FRESH_S, report
                if len(self._kept) > KEPT_MAX:
                    del self._kept[next(iter(self._kept))]
        answer(exchange, report)


def read_costs(config: Config, by: str, now_s: int, days: int) -> CostsReport:
    """The last `days` UTC days. Blocks on the disk.

    Raises:
        LedgerError: the database cannot be read.
    """
    directory = ledger_directory(config.ledger)
    first_s = (now_s // DAY_S - days + 1) * DAY_S
    since = datetime.fromtimestamp(first_s, UTC).strftime("%Y-%m-%d")
    rows = _rows(directory, by, first_s)
    lines = sorted((_line(row.group[0], row.totals) for row in rows), key=_rank, reverse=True)
    if by == "day":
        lines.sort(key=lambda line: line.name, reverse=True)
    reported = read_days(directory / COSTS_DIRECTORY)
    machines = cost_rows(reported, ("day" if by == "day" else "model",), since, "", None)
    if by == "day":
        machines.reverse()
    return CostsReport(
        by=by,
        since=since,
        currency=config.prices.currency,
        is_priced=bool(config.prices.models),
        usage=lines[:LISTED_MAX],
        num_lines=len(lines),
        total=_line("", total_of(rows)),
        machines=[MachineLine(name=name, account=found) for (name,), found in machines[:LISTED_MAX]],
        machines_total=next((found for _, found in cost_rows(reported, (), since, "", None)), None),
    )


def _rows(directory: Path, by: str, first_s: int) -> list[LedgerRow]:
    if not database_path(directory).exists():  # Nothing has ended yet.
        return []
    with LedgerReader(directory) as reader:
        return reader.totals(Query(by=(by,), since_ns=first_s * NS_PER_S))


def _line(name: str, totals: Totals) -> UsageLine:
    tokens = totals.prompt_tokens + totals.completion_tokens
    return UsageLine(
        name=name,
        requests=totals.requests,
        failed=totals.failed,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        completion_tokens=totals.completion_tokens,
        cost_micros=totals.cost_micros,
        accelerator_cost_micros=totals.accelerator_cost_micros,
        per_million_micros=round(totals.accelerator_cost_micros * PER / tokens) if tokens else None,
    )


def _rank(line: UsageLine) -> tuple[int, int, int, str]:
    dear = line.cost_micros, line.accelerator_cost_micros
    return *dear, line.prompt_tokens + line.completion_tokens, line.name
