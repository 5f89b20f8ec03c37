"""The file that a script of this directory leaves: what was measured, beside where, when and with which command."""

import argparse
import json
import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.bench.environment import read_environment


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Give the command line `--json FILE`, also called `--out`; `args.json` is a path or None."""
    parser.add_argument(
        "--json", "--out", type=Path, dest="json", metavar="FILE", help="write the figures here"
    )


def write_results(path: Path | None, figures: Mapping[str, object]) -> None:
    """Write `figures` with the machine, its load, versions, the date and the command line; without a path nothing."""
    if path is None:
        return
    head = {
        "command": " ".join(["python", os.path.relpath(sys.argv[0]), *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "environment": msgspec.to_builtins(read_environment()),
        "load_average": [round(each, 2) for each in os.getloadavg()],
    }
    path.write_text(json.dumps(head | dict(figures), indent=2) + "\n", encoding="utf-8")
