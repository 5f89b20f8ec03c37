"""`penstock quantize`: round a model's weights and write them in a format that other servers load too."""

import argparse
import pydoc_data.topics
from collections.abc import Iterator
from pathlib import Path

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from penstock.cli import console
from penstock.cli.flags import Commands, Help, number
from penstock.config.checkpoints import resolve
from penstock.errors import ConfigError
from penstock.text.tokenizer import Tokenizer

DESCRIPTION = """\
Round a model's weights and write them in a format that other servers load too.

Interrupted work is taken up again by the same command. docs/models.md says how each format is computed."""

EPILOG = """\
formats:
  gptq-int4  four bits in groups, rounded column by column on the calibration text (GPTQ)
  awq-int4   four bits in groups with zero points, inputs scaled first (AWQ)
  int8       eight bits, one scale per output; inputs rounded as they come (W8A8, compressed-tensors)
  fp8        e4m3, one scale per output (compressed-tensors)

examples:
  penstock quantize ./Qwen3-0.6B --to gptq-int4
  penstock quantize ./Qwen3-0.6B --to int8 --output ./Qwen3-0.6B-W8A8
  penstock serve Qwen3-0.6B-gptq-int4"""

TARGETS = ("gptq-int4", "awq-int4", "int8", "fp8")
TEXT_BYTES_MAX = 64 << 20
WORST = 5
"""Layers that the report names."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "quantize",
        help="round a model's weights to 4 or 8 bits",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a directory, a hub id or a demo model, with dense weights"
    )
    parser.add_argument("--to", choices=TARGETS, required=True, metavar="FORMAT", help=", ".join(TARGETS))
    parser.add_argument(
        "--output", type=Path, metavar="DIRECTORY", help="where it goes (default: ./NAME-FORMAT)"
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE",
        help="calibration text, like what the model will see (default: Python's own documentation)",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=number(int, 512, 1 << 24), default=65_536, metavar="N",
        help="tokens of the text to use (default: 65536)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock quantize`."""
    directory = resolve(args.model)
    if directory.is_file():
        raise ConfigError(
            f"{directory}: is GGUF, which is rounded already; give the directory it was made from"
        )
    output: Path = args.output or Path(f"{directory.name}-{args.to}")
    # Torch is loaded late, so that `--help` is quick.
    from penstock.engine.quantize.calibrate import SEQUENCE_TOKENS
    from penstock.engine.quantize.publish import Quantizer

    token_ids = Tokenizer.load(directory).encode(_text(args.text))[: args.tokens]
    sequences = [token_ids[at : at + SEQUENCE_TOKENS] for at in range(0, len(token_ids), SEQUENCE_TOKENS)]
    if not sequences:
        raise ConfigError(f"{args.text}: holds no text")
    quantizer = Quantizer(directory, output, args.to, sequences)
    screen = console.err()
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal) as progress:
        task = progress.add_task(f"{args.to} on {len(token_ids):,} tokens", total=None)
        errors = quantizer.run(lambda done, total: progress.update(task, completed=done, total=total))
    before, after = _size(directory), _size(output)
    mean = sum(each.error for each in errors) / len(errors)
    table = Table(
        "layer", "error", title=f"Largest of {len(errors)} errors, mean {mean:.2%} of a layer's output"
    )
    for each in sorted(errors, key=lambda each: -each.error)[:WORST]:
        table.add_row(each.name, f"{each.error:.2%}")
    out = console.out()
    out.print(table)
    out.print(f"{output}: {after / 1e6:,.1f} MB, was {before / 1e6:,.1f} MB")
    out.print(f"penstock serve {output}")
    return 0


def _text(path: Path | None) -> str:
    if path is None:
        return "\n\n".join(_documentation())
    try:
        with path.open("rb") as file:
            return file.read(TEXT_BYTES_MAX).decode()
    except OSError as error:
        raise ConfigError(f"--text: {path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {path}: is not text in UTF-8 (byte {error.start})") from error


def _documentation() -> Iterator[str]:
    """English prose and code that every Python has."""
    topics: dict[str, str] = pydoc_data.topics.topics
    yield from (topics[name] for name in sorted(topics))


def _size(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.glob("*.safetensors"))
