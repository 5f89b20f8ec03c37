"""Totals of usage as a table for people, or as CSV, JSON or Parquet for machines."""

import csv
import io
from collections.abc import Sequence
from decimal import Decimal
from importlib import import_module

import msgspec

from penstock.cli.tables import Column, Fitted, Row
from penstock.cli.tables import row as table_row
from penstock.errors import ConfigError
from penstock.policy.limits.price import MICROS
from penstock.telemetry.ledger_reader import LedgerRow, Totals

COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
COSTS = ("cost", "accelerator_cost")
_HEADS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
    "accelerator_cost": "machines",
}


def total_of(rows: Sequence[LedgerRow]) -> Totals:
    """The sum of all rows."""
    names = Totals.__struct_fields__
    return Totals(**{name: sum(getattr(row.totals, name) for row in rows) for name in names})


_RANKS = {"cached_tokens": 6, "failed": 5, "accelerator_cost": 4, "prompt_tokens": 3, "completion_tokens": 2}
"""Which columns a narrow terminal goes without, the highest first."""


def as_table(rows: Sequence[LedgerRow], by: Sequence[str], currency: str) -> Fitted:
    """For people: groups, counts, money where there is any or a price list, and the sum in the last line."""
    total = total_of(rows)
    costs = [name for name in COSTS if getattr(total, f"{name}_micros") or (name == "cost" and currency)]
    columns = [Column(head=name.replace("_", " "), right=False) for name in by]
    columns += [Column(head=_HEADS.get(name, name), rank=_RANKS.get(name, 0)) for name in COUNTS]
    for name in costs:
        head = f"{_HEADS.get(name, name)} ({currency})" if currency else _HEADS.get(name, name)
        columns.append(Column(head=head, rank=_RANKS.get(name, 0)))

    def line(groups: Sequence[str], totals: Totals) -> Row:
        counts = [f"{getattr(totals, name):,}" for name in COUNTS]
        return table_row(*groups, *counts, *(f"{_money(totals, name):,}" for name in costs))

    lines = [line([value or "-" for value in row.group], row.totals) for row in rows]
    sum_line = line(["total" if place == 0 else "" for place in range(len(by))], total) if by else None
    return Fitted(columns, lines, total=sum_line)


def as_csv(rows: Sequence[LedgerRow], by: Sequence[str]) -> str:
    """Comma-separated (RFC 4180), without the sum: money as decimals with all six places."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\r\n")
    writer.writerow([*by, *COUNTS, *COSTS])
    for row in rows:
        counts = [getattr(row.totals, name) for name in COUNTS]
        writer.writerow([*map(_inert, row.group), *counts, *(_money(row.totals, name) for name in COSTS)])
    return out.getvalue()


def as_json(rows: Sequence[LedgerRow], by: Sequence[str]) -> str:
    """`{"rows": [...], "total": {...}}`; money as decimal numbers and as whole millionths."""
    document = {
        "rows": [dict(zip(by, row.group, strict=True)) | _fields(row.totals) for row in rows],
        "total": _fields(total_of(rows)),
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def as_parquet(rows: Sequence[LedgerRow], by: Sequence[str]) -> bytes:
    """Columns as in CSV; counts are int64, money is decimal(38, 6).

    Raises:
        ConfigError: pyarrow is not installed.
    """
    try:
        pyarrow, parquet = import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise ConfigError("--format parquet needs pyarrow: pip install 'penstock[parquet]'") from None
    fields = [(name, pyarrow.string()) for name in by]
    fields += [(name, pyarrow.int64()) for name in COUNTS]
    fields += [(name, pyarrow.decimal128(38, 6)) for name in COSTS]
    data: dict[str, list[object]] = {name: [row.group[i] for row in rows] for i, name in enumerate(by)}
    data |= {name: [getattr(row.totals, name) for row in rows] for name in COUNTS}
    data |= {name: [_money(row.totals, name) for row in rows] for name in COSTS}
    out = io.BytesIO()
    parquet.write_table(pyarrow.table(data, schema=pyarrow.schema(fields)), out)
    return out.getvalue()


def _money(totals: Totals, name: str) -> Decimal:
    return (Decimal(getattr(totals, f"{name}_micros")) / MICROS).quantize(Decimal("0.000001"))


def _fields(totals: Totals) -> dict[str, object]:
    counts = {name: getattr(totals, name) for name in COUNTS}
    money = {name: float(_money(totals, name)) for name in COSTS}
    micros = {f"{name}_micros": getattr(totals, f"{name}_micros") for name in COSTS}
    return counts | money | micros


def _inert(text: str) -> str:
    """A spreadsheet must not take what a client sent (a `user` field) for a formula."""
    return f"'{text}" if text[:1] in tuple("=+-@\t\r") else text
