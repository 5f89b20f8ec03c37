"""`penstock usage`: what was used and what it cost, from the ledger: totals as a table for people, or as CSV,
JSON or Parquet for machines.
"""

import argparse
import csv
import io
import os
import re
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from decimal import Decimal
from importlib import import_module
from pathlib import Path

import msgspec

from penstock.cli import console
from penstock.cli.console import Column, Fitted, Row
from penstock.cli.console import row as table_row
from penstock.cli.flags import Commands, Help
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.load import load_config
from penstock.config.tree import Config
from penstock.errors import ConfigError, LedgerError
from penstock.policy.limits.price import MICROS
from penstock.telemetry.costs import COST_GROUPS, COSTS_DIRECTORY, CostAccount, cost_rows, read_days
from penstock.telemetry.ledger_recovery import GROUPS, LedgerReader, LedgerRow, Query, Totals, total_of
from penstock.telemetry.ledger_segment import database_path, ledger_directory

COUNTS = ("requests", "failed", "prompt_tokens", "cached_tokens", "completion_tokens")
COSTS = ("cost", "accelerator_cost")
_HEADS = {
    "prompt_tokens": "prompt",
    "cached_tokens": "cached",
    "completion_tokens": "completion",
    "accelerator_cost": "machines",
}


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


DAY_NS = 86_400 * NS_PER_S
_PARTS = ("requests", "platform", "idle", "reserve")
_COST_FIELDS = tuple(name for name in CostAccount.__struct_fields__ if name != "model")


def costs_as_table(
    rows: Sequence[tuple[tuple[str, ...], CostAccount]], by: Sequence[str], currency: str
) -> Fitted:
    """For people: the bill, what share of it is what, and a million tokens beside its floor."""
    columns = [Column(head=name, right=False) for name in by]
    columns.append(Column(head=f"bill {currency}"))
    columns += [Column(head=name, rank=2 if name == "platform" else 0) for name in _PARTS]
    columns += [Column(head="per 1M"), Column(head="floor"), Column(head="times", rank=3)]
    lines = [table_row(*(value or "-" for value in group), *_cost_cells(found)) for group, found in rows]
    return Fitted(columns, lines)


def _cost_cells(found: CostAccount) -> list[str]:
    shares = [f"{getattr(found, name) / found.bill:.1%}" if found.bill else "-" for name in _PARTS]
    per_million = [
        "-" if each is None else f"{each:,.3g}" if each < 1000 else f"{each:,.0f}"
        for each in (found.per_million, found.floor_per_million, found.over_floor)
    ]
    bill = f"{found.bill:,.2f}" if found.bill >= 1 else f"{found.bill:.6f}"
    return [bill, *shares, *per_million]


def _costs(args: argparse.Namespace, directory: Path, currency: str) -> int:
    """Carry out `penstock usage --cost`."""
    by = ("model",) if args.by == DEFAULT_GROUPS else args.by
    if args.tenant is not None or not set(by) <= set(COST_GROUPS):
        raise ConfigError(
            f"--cost knows only {', '.join(COST_GROUPS)}: what requests of a tenant, key or adapter cost the "
            "machines is in the column 'machines' without it"
        )
    if not (directory / COSTS_DIRECTORY).is_dir() and not database_path(directory).exists():
        raise LedgerError(f"{directory}: there is no ledger here")
    since, until = _whole_days(args.since, args.until)
    rows = cost_rows(read_days(directory / COSTS_DIRECTORY), by, since, until, args.model)
    if not rows:
        note = f"no cost of machines in {directory}; prices.accelerators says what they cost"
        console.err().print(note, style="dim", markup=False)
    if args.format == "table":
        if rows or args.output:
            _put(args, costs_as_table(rows, by, currency))
        return 0
    dicts = [
        dict(zip(by, group, strict=True)) | {name: getattr(found, name) for name in _COST_FIELDS}
        for group, found in rows
    ]
    if args.format == "json":
        document = {"currency": currency, "rows": dicts}
        _put(args, (msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"))
        return 0
    if args.format == "parquet":
        raise ConfigError("--cost has the formats table, csv and json")
    out = io.StringIO()
    writer = csv.DictWriter(out, (*by, *_COST_FIELDS), lineterminator="\r\n")
    writer.writeheader()
    writer.writerows(dicts)
    _put(args, out.getvalue().encode())
    return 0


def _whole_days(since_ns: int | None, until_ns: int | None) -> tuple[str, str]:
    """The first day, and the one behind the last, empty for no bound. The cost of machines is kept by the
    day: a day that is wanted in part is counted whole, and standard error says so.
    """
    since = "" if since_ns is None else _day(since_ns)
    until = "" if until_ns is None else _day(until_ns + DAY_NS - 1)
    if any(each is not None and each % DAY_NS for each in (since_ns, until_ns)):
        span = f"{f' from {since}' if since else ''}{f' to before {until}' if until else ''}"
        note = f"the cost of machines is kept by UTC day: this is all of it{span}"
        console.err().print(note, style="dim", markup=False)
    return since, until


def _day(wall_ns: int) -> str:
    return _shown(wall_ns)[:10]


FORMATS = ("table", "csv", "json", "parquet")
DEFAULT_GROUPS = ("tenant", "model", "day")
_UNITS_S = {"h": 3600, "d": 86_400, "w": 7 * 86_400}

DESCRIPTION = """\
Say what was used and what it cost: requests, tokens and money from the ledger, summed up.

Reads the ledger's database and what the journals of running (or crashed) gateways hold beyond it;
it may be used beside them at any time. All days are UTC. The cell that a request
came to bills it, whoever computed it; --by origin shows what this one computed for others."""

EPILOG = f"""\
groups for --by:
  {", ".join(list(GROUPS)[:6])},
  {", ".join(list(GROUPS)[6:])}

times for --since and --until (--cost counts whole days):
  2026-11-21, 2026-11-21T08:00, 2026-11-21T08:00+02:00 (without a zone: UTC), or ago: 24h, 7d, 4w

columns:
  with --cost (where prices.accelerators says what a machine costs an hour): the bill, and what
  share of it requests paid, was the platform's (probes, attempts that lost, workers that died),
  idle, or reserve (machines that start, load or are out of service); what a million tokens cost,
  and what they would cost in full batches on these machines

  else requests, and of these those that failed (or were cancelled, or dropped from the queue); prompt
  tokens, and of these those from the prefix cache; generated tokens; cost by the price list; what
  the machines cost meanwhile, where they have a price

exit code: 0 also if there was no usage, 1 no ledger, 2 wrong usage

examples:
  penstock usage
  penstock usage --by tenant --since 2026-11-01 --until 2026-12-01
  penstock usage --by day,outcome --tenant acme --since 7d
  penstock usage --cost --by model,day --since 7d
  penstock usage --by month,tenant,key --format csv > usage.csv
  penstock usage --format parquet -o usage.parquet
  penstock usage --directory /ledgers/eu --directory /ledgers/us     (cells, each request once)"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "usage",
        help="say what was used and what it cost",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--by",
        type=_groups,
        default=DEFAULT_GROUPS,
        metavar="GROUPS",
        help='sum up by these, with commas; "" for one total (default: tenant,model,day)',
    )
    parser.add_argument(
        "--since", type=_time, metavar="TIME", help="ended then or later (default: all there is)"
    )
    parser.add_argument("--until", type=_time, metavar="TIME", help="ended before")
    parser.add_argument(
        "--cost",
        action="store_true",
        help="say where the machines' money went instead, by model, day or month (default: model)",
    )
    parser.add_argument("--tenant", metavar="NAME", help="this tenant's only")
    parser.add_argument("--model", metavar="NAME", help="answers of this model only")
    parser.add_argument(
        "--format", choices=FORMATS, default="table", metavar="FORMAT", help="table, csv, json or parquet"
    )
    parser.add_argument("-o", dest="output", metavar="FILE", help="write there instead of to standard output")
    parser.add_argument(
        "-c",
        dest="config",
        metavar="FILE",
        help="the server's configuration, which names the ledger's directory",
    )
    parser.add_argument(
        "--directory",
        metavar="DIR",
        action="append",
        help="the ledger's directory (default: the configuration's, or the user's); again for each cell's",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock usage`."""
    config = load_config(Path(args.config)) if args.config else Config()
    directory, *others = map(Path, args.directory or [ledger_directory(config.ledger, os.environ)])
    if args.format == "parquet" and not args.output and sys.stdout.isatty():
        raise ConfigError("--format parquet is not for terminals: name a file with -o")
    if args.cost and others:
        raise ConfigError("--cost is about the machines of one ledger: name one --directory")
    if args.cost:
        return _costs(args, directory, config.prices.currency)
    where = {name: value for name in ("tenant", "model") if (value := getattr(args, name)) is not None}
    query = Query(by=args.by, since_ns=args.since, until_ns=args.until, where=where)
    with LedgerReader(directory, *others) as reader:
        rows, running = reader.totals(query), reader.running
    _write(args, rows, config.prices.currency if config.prices.models else "")
    note = console.err()
    if not rows:
        places = ", ".join(map(str, (directory, *others)))
        note.print(f"no usage{_span(query)} in {places}", style="dim", markup=False)
    if running and args.format == "table":
        note.print(
            f"{running} requests are running now and count when they are over", style="dim", markup=False
        )
    return 0


def _write(args: argparse.Namespace, rows: list[LedgerRow], currency: str) -> None:
    if args.format == "parquet":
        _put(args, as_parquet(rows, args.by))
    elif args.format == "csv":
        _put(args, as_csv(rows, args.by).encode())
    elif args.format == "json":
        _put(args, as_json(rows, args.by).encode())
    elif rows or args.output:
        _put(args, as_table(rows, args.by, currency))


def _put(args: argparse.Namespace, found: Fitted | bytes) -> None:
    """Write it where it is wanted.

    Raises:
        LedgerError: the file cannot be written.
    """
    if isinstance(found, bytes):
        data = found
    else:
        screen = console.out()
        if not args.output:
            screen.print(found)
            return
        with screen.capture() as capture:
            screen.print(found)
        data = capture.get().encode()
    if not args.output:
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    try:
        Path(args.output).write_bytes(data)
    except OSError as error:
        raise LedgerError(f"{args.output}: cannot be written: {error.strerror}") from error


def _span(query: Query) -> str:
    since = "" if query.since_ns is None else f" since {_shown(query.since_ns)}"
    until = "" if query.until_ns is None else f" until {_shown(query.until_ns)}"
    names = "".join(f" of {name} {value!r}" for name, value in query.where.items())
    return names + since + until


def _shown(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns // NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",")) if text else ()
    for name in names:
        if name not in GROUPS:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(GROUPS)}")
    if len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r} names a group twice")
    return names


def _time(text: str) -> int:
    """Nanoseconds since the epoch."""
    if match := re.fullmatch(r"(\d{1,5})([hdw])", text):
        return SystemClock().wall_ns() - int(match[1]) * _UNITS_S[match[2]] * NS_PER_S
    try:
        when = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time such as 2026-11-21 or 7d") from None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return int(when.timestamp()) * NS_PER_S
