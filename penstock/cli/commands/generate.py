"""`penstock generate`: answer every line of a file, without a server."""

import argparse
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import msgspec
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from penstock.cli import console
from penstock.cli.flags import Commands, Help, number, size
from penstock.cli.wiring.batch_lines import BatchLine, BatchReader, BatchWriter, id_of
from penstock.clock import NS_PER_S, SystemClock
from penstock.errors import ConfigError, InvalidRequest, PenstockError, TooLarge
from penstock.offline.llm import LLM, PendingCall

LINE_BYTES_MAX = 8 * 1024 * 1024
"""As of a request's body."""
EXIT_FAILED = 1
_TEMPORARY = frozenset({429, 500, 502, 503})
"""Statuses of lines that are worth another try."""

DESCRIPTION = """\
Answer every line of a file, without a server. Lines are of OpenAI's batch files, or plain:

  {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}
  {"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}

Answers are written as they come, with the line's custom_id (or line-NUMBER). A line that fails is
written as an error and stops no other. Run again, lines that have an answer are skipped."""

EPILOG = """\
exit code: 0 every line has an answer, 1 some failed (or the model could not run), 2 wrong usage

examples:
  penstock generate questions.jsonl                          writes questions.out.jsonl
  penstock generate batch.jsonl --model ./Qwen3-0.6B --name gpt-4o-mini -o answers.jsonl
  grep -v done all.jsonl | penstock generate - | jq -r .text"""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "generate",
        help="answer every line of a file, without a server",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument("file", metavar="FILE.jsonl", help="the requests; -: standard input")
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="where answers go; -: standard output (default: FILE.out.jsonl)",
    )
    parser.add_argument("--model", default="penstock-demo", metavar="MODEL", help="as for serve")
    parser.add_argument("--name", default="", help="what lines call the model (default: last part of MODEL)")
    parser.add_argument(
        "--lora", action="append", default=[], metavar="NAME=PATH",
        help="a LoRA adapter, and what lines call it; may be given again",
    )  # fmt: skip
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--quantization", choices=("none", "int8", "int4"), default="none")
    parser.add_argument("--threads", type=number(int, 0, 4096), default=0, metavar="N", help="0: all cores")
    parser.add_argument("--max-model-len", type=number(int, 0, 100_000_000), default=0, metavar="N")
    parser.add_argument("--kv-memory", type=size, default=0, metavar="SIZE", help="such as 2GiB")
    parser.add_argument(
        "--seed", type=number(int, 0, 2**63 - 1), default=0, metavar="N",
        help="lines without one get theirs from this and their id (default: 0)",
    )  # fmt: skip
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock generate`."""
    adapters = dict(map(_adapter, args.lora))
    place = _place(args.file, args.output)
    console.check_place(place)
    done = _answered(place)
    with ExitStack() as stack:
        lines = stack.enter_context(_opened(args.file))
        out = sys.stdout.buffer if str(place) == "-" else stack.enter_context(place.open("ab"))
        llm = stack.enter_context(
            LLM(
                args.model,
                served_model_name=args.name,
                seed=args.seed,
                engine_config={
                    "dtype": args.dtype,
                    "quantization": args.quantization,
                    "threads": args.threads,
                    "max_model_len": args.max_model_len,
                    "kv_memory_bytes": args.kv_memory,
                },
            )
        )
        batch = _Batch(llm, adapters, done, SystemClock().wall_ns() // NS_PER_S)
        with _bar() as bar:
            task = bar.add_task("lines", total=_num_lines(args.file))
            for written in batch.run(lines):
                out.write(written)
                out.flush()
                bar.update(task, completed=batch.num_done)
    words = f"{batch.num_answered} answered, {batch.num_failed} failed, {batch.num_skipped} done before"
    where = "standard output" if str(place) == "-" else place
    console.err().print(f"{words}: {where}", markup=False, soft_wrap=True)
    return EXIT_FAILED if batch.num_failed else 0


class _Batch:
    """One run through a file."""

    def __init__(self, llm: LLM, adapters: dict[str, str], done: set[str], created_s: int) -> None:
        self._llm, self._done = llm, done
        self._reader, self._writer = BatchReader(llm, adapters), BatchWriter(llm, created_s)
        self._waiting: dict[int, BatchLine] = {}
        """By number of the request; as many as the LLM has at once."""
        self._seen: set[str] = set()
        self.num_answered = self.num_failed = self.num_skipped = 0

    @property
    def num_done(self) -> int:
        """Lines that are over."""
        return self.num_answered + self.num_failed + self.num_skipped

    def run(self, lines: IO[bytes]) -> Iterator[bytes]:
        """The lines to write for each input line, as they come."""
        outcomes = self._llm.outcomes(self._asks(lines))
        try:
            for index, outcome in outcomes:
                line = self._waiting.pop(index)
                if isinstance(outcome, PenstockError):
                    self.num_failed += 1
                    yield self._writer.failed(line, outcome)
                else:
                    self.num_answered += 1
                    yield self._writer.answered(line, outcome)
        finally:
            outcomes.close()

    def _asks(self, lines: IO[bytes]) -> Iterator[PendingCall | PenstockError]:
        index = 0
        for line_number, data in enumerate(_lines(lines), start=1):
            if not data.strip():
                continue
            custom_id = id_of(data, line_number)
            if custom_id in self._done:
                self.num_skipped += 1
                continue
            line, ask = self._ask(data, custom_id, line_number)
            self._waiting[index] = line
            index += 1
            yield ask

    def _ask(
        self, data: bytes, custom_id: str, line_number: int
    ) -> tuple[BatchLine, PendingCall | PenstockError]:
        failed = BatchLine(custom_id, url="?" if b'"url"' in data else "")
        if len(data) > LINE_BYTES_MAX:
            return failed, TooLarge(f"The line has over {LINE_BYTES_MAX} bytes.")
        if custom_id in self._seen:
            other = BatchLine(f"line-{line_number}", url=failed.url)
            return other, InvalidRequest(f"An earlier line is called '{custom_id}' too.", param="custom_id")
        self._seen.add(custom_id)
        try:
            return self._reader.read(data, custom_id)
        except PenstockError as error:
            return failed, error


def _lines(file: IO[bytes]) -> Iterator[bytes]:
    """Each line; of one that is too long, its beginning."""
    while data := file.readline(LINE_BYTES_MAX + 1):
        rest = data
        while rest and len(rest) > LINE_BYTES_MAX and not rest.endswith(b"\n"):
            rest = file.readline(LINE_BYTES_MAX + 1)
        yield data


def _opened(name: str) -> IO[bytes]:
    try:
        return os.fdopen(os.dup(sys.stdin.fileno()), "rb") if name == "-" else Path(name).open("rb")
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from error


def _place(name: str, output: Path | None) -> Path:
    if output is not None:
        return output
    return Path("-") if name == "-" else Path(name.removesuffix(".jsonl") + ".out.jsonl")


class _Response(msgspec.Struct):
    status_code: int = 200


class _Written(msgspec.Struct):
    custom_id: str
    response: _Response | None = None
    status_code: int = 200


def _answered(place: Path) -> set[str]:
    """The ids that have an answer there already, or an error that would come again.

    A line that a crash has cut short is taken away.

    Raises:
        ConfigError: the file holds something else.
    """
    if str(place) == "-" or not place.exists():
        return set()
    found = set[str]()
    end = 0
    try:
        with place.open("r+b") as file:
            for data in file:
                if not data.endswith(b"\n"):
                    break
                end += len(data)
                line = msgspec.json.decode(data, type=_Written)
                status = line.response.status_code if line.response is not None else line.status_code
                if status not in _TEMPORARY:
                    found.add(line.custom_id)
            file.truncate(end)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{place}: is there, and no answers of this command: {error}") from None
    except OSError as error:
        raise ConfigError(f"{place}: {error.strerror or error}") from error
    return found


def _num_lines(name: str) -> int | None:
    path = Path(name)
    if name == "-" or not path.is_file():
        return None
    with path.open("rb") as file:
        return sum(bool(data.strip()) for data in file)


def _adapter(text: str) -> tuple[str, str]:
    name, mark, path = text.partition("=")
    if not (name and mark and path):
        raise ConfigError(f"--lora: expected NAME=PATH, got {text[:80]!r}")
    return name, path


def _bar() -> Progress:
    screen = console.err()
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TimeRemainingColumn(),
    )  # fmt: skip
    return Progress(*columns, console=screen, transient=True, disable=not screen.is_terminal)
