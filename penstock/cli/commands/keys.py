"""`penstock keys`: make, list, rotate and revoke API keys in the file that a gateway reads
(`auth.keys_file`).
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.table import Table

from penstock.cli import console
from penstock.cli.flags import Commands, Help, duration
from penstock.cli.wiring.state import default_keys_file
from penstock.clock import NS_PER_S, SystemClock
from penstock.config.load import load_config
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.gateway.identity import api_keys
from penstock.gateway.identity.api_keys import ApiKey, Issued, edit_keys, read_keys

DESCRIPTION = """\
Make, list, rotate and revoke API keys.

Keys are stored hashed: a key is shown once, when it is made. A running gateway whose auth.keys_file
is this file takes changes within seconds."""

EPILOG = """\
FILE is --file, else auth.keys_file of the configuration given with -c, else PENSTOCK_KEYS_FILE, else
keys.jsonl in the state directory (PENSTOCK_STATE_DIR or ~/.local/state/penstock).

examples:
  penstock keys create --tenant acme --tier pro --expires 90d --label "batch jobs"
  penstock keys list
  penstock keys rotate sk-k3v7q2mwz5ta --grace 7d     the old key works for another week
  penstock keys revoke sk-k3v7q2mwz5ta                at once

`penstock keys ACTION --help` tells more about an action."""

CREATE = """\
Make a key and print it on standard output, once. Everything else goes to standard error, so
KEY=$(penstock keys create --tenant acme) works."""

ROTATE = """\
Make a new key of the same tenant, print it once, and let the old one end after a grace time. The
tenant's prefix cache, limits and usage continue unchanged."""

REVOKE = "Refuse a key from now on. KEY is a prefix (sk-...), or a whole key that was found somewhere."


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "keys",
        help="make, list, rotate and revoke API keys",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    create = _action(actions, "create", "make a key", CREATE, _create)
    create.add_argument("--tenant", required=True, metavar="ID", help="whose key it is")
    create.add_argument(
        "--tier", default="", metavar="NAME", help="tier of a tenant that the configuration does not list"
    )
    create.add_argument("--label", default="", metavar="TEXT", help="a note for people")
    create.add_argument(
        "--admin", action="store_true", help="it may also look at the fleet and change it (/admin)"
    )
    create.add_argument(
        "--scrape",
        action="store_true",
        help="it may read /metrics and /status.json of all tenants, and nothing else",
    )
    _add_expires(create, "never")
    create.add_argument(
        "--not-before", type=duration, default=0, metavar="TIME", help="accept it only after this time"
    )
    listing = _action(actions, "list", "list keys, without the keys themselves", "List keys.", _list)
    listing.add_argument("--tenant", metavar="ID", help="only this tenant's")
    rotate = _action(actions, "rotate", "replace a key by a new one", ROTATE, _rotate)
    rotate.add_argument("key", metavar="KEY", help="its prefix (sk-...)")
    rotate.add_argument(
        "--grace", type=duration, default=86_400, metavar="TIME", help="the old one still works so long (1d)"
    )
    _add_expires(rotate, "as long as the old one was to live")
    revoke = _action(actions, "revoke", "refuse a key from now on", REVOKE, _revoke)
    revoke.add_argument("key", metavar="KEY", help="its prefix (sk-...), or the whole key")


def _action(
    actions: "Commands[argparse.ArgumentParser]",
    name: str,
    words: str,
    description: str,
    run: Callable[[argparse.Namespace], int],
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=words, description=description, formatter_class=Help, allow_abbrev=False
    )
    parser.add_argument("-c", dest="config", metavar="FILE", help="YAML configuration of the gateway")
    parser.add_argument("--file", metavar="FILE", help="the file of keys")
    parser.add_argument("--json", action="store_true", help="JSON on standard output")
    parser.set_defaults(run=run)
    return parser


def _add_expires(parser: argparse.ArgumentParser, default: str) -> None:
    parser.add_argument(
        "--expires",
        type=lambda text: 0 if text == "never" else duration(text),
        metavar="TIME",
        help=f"it ends after this time: 30d, 12h, never (default: {default})",
    )


def _create(args: argparse.Namespace) -> int:
    config, path, now_s = _config(args), _path(args), _now_s()

    def change(keys: tuple[ApiKey, ...]) -> tuple[Sequence[ApiKey], Issued]:
        # A tenant's further keys are of its tier without saying so again.
        tiers = (key.tier for key in keys if key.tenant == args.tenant and not key.revoked_s)
        issued = api_keys.issue(
            now_s,
            tenant=args.tenant,
            tier=args.tier or next(tiers, ""),
            label=args.label,
            not_before_s=now_s + args.not_before if args.not_before else 0,
            expires_s=now_s + args.expires if args.expires else 0,
            admin=args.admin,
            scrape=args.scrape,
        )
        changed = (*keys, issued.record)
        _check_tiers(changed, config)
        return changed, issued

    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _show_new(edit_keys(path, change), path, args, now_s)
    return 0


def _rotate(args: argparse.Namespace) -> int:
    path, now_s = _path(args), _now_s()
    expires_s = None if args.expires is None else now_s + args.expires if args.expires else 0

    def change(keys: tuple[ApiKey, ...]) -> tuple[Sequence[ApiKey], tuple[ApiKey, Issued]]:
        found = api_keys.find(keys, args.key)
        old, issued = api_keys.rotate(found, now_s, grace_s=args.grace, expires_s=expires_s)
        return (*(old if key.id == old.id else key for key in keys), issued.record), (old, issued)

    _must_exist(path)
    old, issued = edit_keys(path, change)
    _show_new(issued, path, args, now_s)
    _say(f"{old.prefix} ends {_date(old.expires_s)}.")
    return 0


def _revoke(args: argparse.Namespace) -> int:
    path, now_s = _path(args), _now_s()

    def change(keys: tuple[ApiKey, ...]) -> tuple[Sequence[ApiKey], ApiKey]:
        old = api_keys.revoke(api_keys.find(keys, args.key), now_s)
        return [old if key.id == old.id else key for key in keys], old

    _must_exist(path)
    revoked = edit_keys(path, change)
    if args.json:
        _print_json(_shown(revoked, now_s))
    _say(f"{revoked.prefix} of tenant {revoked.tenant} is revoked.")
    return 0


def _list(args: argparse.Namespace) -> int:
    path, now_s = _path(args), _now_s()
    _must_exist(path)
    keys = [key for key in read_keys(path) if args.tenant in (None, key.tenant)]
    if args.json:
        _print_json([_shown(key, now_s) for key in keys])
        return 0
    table = Table("key", "tenant", "tier", "state", "created", "expires", "label", box=None, pad_edge=False)
    for key in keys:
        dates = (_date(key.created_s), _date(key.expires_s) if key.expires_s else "never")
        row = (key.prefix, key.tenant, key.tier, key.state(now_s), *dates, key.label)
        table.add_row(*map(console.printable, row))
    console.out().print(table, markup=False)
    return 0


def _show_new(issued: Issued, path: Path, args: argparse.Namespace, now_s: int) -> None:
    record = issued.record
    if args.json:
        _print_json({"key": issued.key, **_shown(record, now_s)})
    else:
        sys.stdout.write(issued.key + "\n")
    expires = _date(record.expires_s) if record.expires_s else "never"
    tier = f" ({record.tier})" if record.tier else ""
    _say(f"{record.prefix} for tenant {record.tenant}{tier}, expires {expires}, is in {path}.")
    _say("This is the only time that the key is shown.")
    if not args.config:
        _say(f"A gateway takes it with auth.keys_file or PENSTOCK_KEYS_FILE set to {path}.")


def _shown(key: ApiKey, now_s: int) -> dict[str, object]:
    """A record without its hash, for machines."""
    fields: dict[str, object] = {"prefix": key.prefix, "state": key.state(now_s)}
    for name in (
        "tenant",
        "tier",
        "label",
        "created_s",
        "not_before_s",
        "expires_s",
        "revoked_s",
        "replaces",
        "admin",
        "scrape",
    ):
        fields[name] = getattr(key, name)
    return fields


def _config(args: argparse.Namespace) -> Config | None:
    return load_config(Path(args.config)) if args.config else None


def _path(args: argparse.Namespace) -> Path:
    config = _config(args)
    named = args.file or (config.auth.keys_file if config else "") or os.environ.get("PENSTOCK_KEYS_FILE")
    return Path(named) if named else default_keys_file()


def _must_exist(path: Path) -> None:
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file; `penstock keys create` makes it")


def _check_tiers(keys: Sequence[ApiKey], config: Config | None) -> None:
    """With a configuration: would the gateway take this file?"""
    tiers = (tier.name for tier in config.tiers) if config else {key.tier for key in keys}
    listed = [tenant.id for tenant in config.tenants] if config else ()
    if problem := api_keys.tier_problem(keys, tiers, listed):
        raise ConfigError(problem)


def _now_s() -> int:
    return SystemClock().wall_ns() // NS_PER_S


def _date(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _print_json(value: object) -> None:
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value)).decode() + "\n")


def _say(text: str) -> None:
    console.err().print(text, markup=False, soft_wrap=True)
