"""`penstock cache`: which models of the hub and of object storage are kept on this machine's disk."""

import argparse
from datetime import UTC, datetime

from penstock.cli import console
from penstock.cli.console import Column, Fitted, row
from penstock.cli.flags import Commands, Help
from penstock.clock import NS_PER_S
from penstock.errors import ConfigError
from penstock.weight_cache.cache import Entry, WeightCache
from penstock.weight_cache.fetch import machine_cache

DESCRIPTION = """\
Show, verify or delete models that were fetched from the hub or from object storage (`s3://`).

They are fetched once for all processes, one at a time; a download that broke off is resumed;
every file must have its source's digest. The least recently used make room for others."""

EPILOG = """\
environment:
  PENSTOCK_CACHE         the directory (default: ~/.cache/penstock)
  PENSTOCK_CACHE_BYTES   what all models may take, such as 200GiB (default: what the disk has)

NAME is a model as it was asked for, or its directory. A model that a process uses is not
deleted.
exit code: 0 done, 1 a model is damaged or in use, or there is none of that name, 2 wrong usage

examples:
  penstock cache
  penstock cache --verify                  read all files again; damaged ones come again next time
  penstock cache --remove Qwen/Qwen3-0.6B"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "cache",
        help="show or delete models that were fetched from elsewhere",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help="this model only")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--verify", action="store_true", help="read the files again and compare digests")
    what.add_argument("--remove", action="store_true", help="delete the model")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock cache`."""
    cache = machine_cache()
    entries = [entry for entry in cache.entries() if not args.name or args.name in _names(entry)]
    if args.name and not entries:
        console.err().print(f"{args.name}: not in {cache.place}", markup=False, soft_wrap=True)
        return 1
    if args.remove:
        if not args.name:
            raise ConfigError("--remove: name the model")
        return _remove(cache, entries)
    if args.verify:
        return _verify(cache, entries)
    _show(cache, entries)
    return 0


def _names(entry: Entry) -> tuple[str, ...]:
    return (entry.directory.name, *((entry.model.name,) if entry.model else ()))


def _title(entry: Entry) -> str:
    return entry.model.name if entry.model else entry.directory.name


def _show(cache: WeightCache, entries: list[Entry]) -> None:
    ranks = {"model": 0, "version": 2, "GB": 0, "files": 3, "used": 1, "digest": 4}
    columns = tuple(Column(head=head, right=head == "GB", rank=rank) for head, rank in ranks.items())
    rows = [row(*_cells(entry)) for entry in reversed(entries)]
    held = sum(entry.num_bytes for entry in entries)
    bound = f" of {cache.bytes_max / 1e9:.1f}" if cache.bytes_max else ""
    if rows:
        console.out().print(Fitted(columns, rows))
    console.err().print(f"{cache.place}: {held / 1e9:.1f}{bound} GB", markup=False, soft_wrap=True)


def _cells(entry: Entry) -> tuple[str, ...]:
    model = entry.model
    is_whole = model is not None and model.is_whole
    used = datetime.fromtimestamp(entry.used_ns / NS_PER_S, UTC).strftime("%Y-%m-%d %H:%M")
    return (
        _title(entry),
        model.version[:12] if model else "",
        f"{entry.num_bytes / 1e9:.2f}",
        str(len(model.files)) + ("" if is_whole else ", not all") if model else "none",
        "now" if entry.is_used else used,
        model.digest if model and is_whole else "",
    )


def _verify(cache: WeightCache, entries: list[Entry]) -> int:
    is_good = True
    for entry in entries:
        wrong = cache.verify(entry) if entry.model else []
        is_good = is_good and not wrong
        for each in wrong or ["whole" if entry.model and entry.model.is_whole else "not all of it is here"]:
            console.out().print(f"{_title(entry)}: {each}", markup=False, soft_wrap=True)
    return 0 if is_good else 1


def _remove(cache: WeightCache, entries: list[Entry]) -> int:
    is_gone = True
    for entry in entries:
        gone = cache.remove(entry)
        is_gone = is_gone and gone
        said = "deleted" if gone else "is in use"
        console.err().print(f"{_title(entry)}: {said}", markup=False, soft_wrap=True)
    return 0 if is_gone else 1
