"""`penstock chat`: a conversation in the terminal with any OpenAI server.

Ctrl-C stops the answer and keeps what was said; Ctrl-D leaves. With a question on the command line or on
standard input it answers once, on standard output, and nothing else goes there.
"""

import argparse
import asyncio
import contextlib
import sys
from dataclasses import dataclass, field

import msgspec

from penstock.bench.client import CannotConnect, Client
from penstock.cli import console
from penstock.cli.commands.remote import Unusable, add_remote_flags, connect, no_server, pick_model, refused
from penstock.cli.flags import Commands, Help, number
from penstock.clock import NS_PER_S, Clock, SystemClock
from penstock.errors import ConfigError, PenstockError
from penstock.protocol.openai import UsageBody
from penstock.protocol.server_answers import ChatEvent, decode_chat_event, error_text
from penstock.protocol.stream import EventReader

STDIN_CHARS_MAX = 8 * 1024 * 1024
MESSAGES_MAX = 2000
"""A conversation's length; the oldest turns go first."""

EPILOG = """\
in a conversation:
  Ctrl-C           stop the answer (at the prompt: clear the line)
  Ctrl-D, /quit    leave
  /reset           forget the conversation
  /system TEXT     set the system message and start over; without TEXT: show it

examples:
  penstock chat
  penstock chat "Name three rivers."
  git diff | penstock chat --system "Write a commit message for this diff."
  penstock chat --url http://gpu-box:8000/v1 --model qwen3-8b"""

KEYS_HINT = "Ctrl-C stops an answer, Ctrl-D leaves, /reset starts over, /system TEXT sets the system message."


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "chat",
        help="talk to a model in the terminal",
        description="Talk to a model in the terminal, or ask one question and exit.",
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    parser.add_argument(
        "prompt", nargs="?", metavar="PROMPT", help="ask this once and exit; - reads standard input"
    )
    add_remote_flags(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument(
        "--temperature",
        type=number(float, 0, 2),
        metavar="T",
        help="0 always takes the likeliest word (default: the server's)",
    )
    parser.add_argument(
        "--max-tokens",
        type=number(int, 1, 1_000_000),
        metavar="N",
        help="longest answer (default: the server's)",
    )
    parser.set_defaults(run=run)


@dataclass(slots=True)
class Conversation:
    """The conversation so far and the settings for its answers."""

    model: str
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    turns: list[dict[str, str]] = field(default_factory=list[dict[str, str]])

    def body(self) -> bytes:
        """The request for the next answer."""
        head = [{"role": "system", "content": self.system}] if self.system else []
        fields: dict[str, object] = {
            "model": self.model,
            "messages": [*head, *self.turns],
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.temperature is not None:
            fields["temperature"] = self.temperature
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        return msgspec.json.encode(fields)

    def say(self, role: str, content: str) -> None:
        """Add a turn."""
        self.turns.append({"role": role, "content": content})
        del self.turns[:-MESSAGES_MAX]


class Answer:
    """An answer as it streams in, printed at once. A `BodySink`."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self._reader = clock, EventReader()
        self._sent_ns = clock.now_ns()
        self._first_ns = self._last_ns = 0
        self._num_chunks = 0
        self._filter = sys.stdout.isatty()
        self._pieces: list[str] = []
        self._usage: UsageBody | None = None
        self.trouble = ""
        self.ended = False

    @property
    def text(self) -> str:
        """All that was said."""
        return "".join(self._pieces)

    def on_bytes(self, data: bytes) -> None:
        """Print what is new."""
        try:
            for event in self._reader.feed(data):
                if event == b"[DONE]":
                    self.ended = True
                else:
                    self._take(decode_chat_event(event))
        except (ValueError, msgspec.DecodeError) as error:
            self.trouble = f"unreadable stream: {error}"
        sys.stdout.flush()

    def _take(self, chunk: ChatEvent) -> None:
        if chunk.error is not None:
            self.trouble = error_text(chunk.error) or "unknown error"
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self.ended = self.ended or choice.finish_reason is not None
            if not choice.is_output:
                continue
            self._last_ns = self._clock.now_ns()
            self._first_ns = self._first_ns or self._last_ns
            self._num_chunks += 1
            self._pieces.append(choice.content)
            sys.stdout.write(console.printable(choice.content) if self._filter else choice.content)

    def summary(self) -> str:
        """Length and speed in one line."""
        if not self._num_chunks:
            return "no output"
        tokens = (self._usage.completion_tokens or 0) if self._usage else self._num_chunks
        first_s = (self._first_ns - self._sent_ns) / NS_PER_S
        words = f"{tokens} tokens, first after {first_s:.2f} s"
        if tokens > 1 and self._last_ns > self._first_ns:
            words += f", then {(tokens - 1) * NS_PER_S / (self._last_ns - self._first_ns):.0f} tokens/s"
        return words


async def ask(client: Client, conversation: Conversation, answer: Answer) -> None:
    """Stream one answer.

    Raises:
        Unusable: the server refused, or its stream broke or failed.
        EndpointError: it cannot be reached, or went away.
    """
    try:
        response = await client.post("/chat/completions", conversation.body(), answer)
    except CannotConnect as error:
        raise CannotConnect(no_server(error)) from error
    if response.status != 200:
        raise Unusable(refused(response.status, response.body))
    if answer.trouble or not answer.ended:
        raise Unusable(f"the answer broke off: {answer.trouble or 'the stream ended early'}")


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock chat`."""
    prompt = _given_prompt(args)
    client = connect(args)
    # One loop for the whole conversation, so that the connection is kept alive between turns. The runner
    # turns Ctrl-C into a cancellation of the answer and then raises KeyboardInterrupt here.
    with asyncio.Runner() as runner:
        try:
            model = runner.run(pick_model(client, args.model))
            conversation = Conversation(model, args.system, args.temperature, args.max_tokens)
            if prompt is not None:
                return _once(runner, client, conversation, prompt)
            return _Repl(runner, client, conversation).run()
        finally:
            runner.run(client.close())


def _given_prompt(args: argparse.Namespace) -> str | None:
    piped = args.prompt == "-" or (args.prompt is None and not sys.stdin.isatty())
    if not piped:
        return args.prompt
    try:
        text = sys.stdin.read(STDIN_CHARS_MAX + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not UTF-8 text: {error}") from error
    if len(text) > STDIN_CHARS_MAX:
        raise ConfigError(f"standard input is over {STDIN_CHARS_MAX} characters")
    if not text.strip():
        raise ConfigError("there is no question: standard input is empty")
    return text


def _once(runner: asyncio.Runner, client: Client, conversation: Conversation, prompt: str) -> int:
    answer = Answer(SystemClock())
    conversation.say("user", prompt)
    try:
        runner.run(ask(client, conversation, answer))
    finally:
        if answer.text and not answer.text.endswith("\n"):
            print(flush=True)
    if sys.stderr.isatty():
        console.err().print(answer.summary(), style="dim")
    return 0


class _Repl:
    """The conversation loop. Everything it prints besides answers is dim."""

    def __init__(self, runner: asyncio.Runner, client: Client, conversation: Conversation) -> None:
        self._runner, self._client, self._conversation = runner, client, conversation
        self._out = console.out()

    def run(self) -> int:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 # pyright: ignore[reportUnusedImport] # Gives input() editing and history.
        self._note(f"{self._conversation.model} at {self._client.endpoint.url}\n{KEYS_HINT}")
        while True:
            try:
                line = input("\n> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                self._note("\n(Ctrl-D or /quit leaves)")
                continue
            if line in {"/quit", "/exit", "/q"}:
                return 0
            if line.startswith("/"):
                self._command(*line[1:].split(None, 1))
            elif line:
                self._turn(line)

    def _command(self, name: str = "", rest: str = "") -> None:
        if name == "reset":
            self._conversation.turns.clear()
            self._note("the conversation starts over")
        elif name == "system" and rest:
            self._conversation.system = rest
            self._conversation.turns.clear()
            self._note("the system message is set; the conversation starts over")
        elif name == "system":
            self._note(self._conversation.system or "there is no system message")
        else:
            self._note(f"there is no /{name}; {KEYS_HINT}")

    def _turn(self, line: str) -> None:
        answer, conversation = Answer(SystemClock()), self._conversation
        conversation.say("user", line)
        try:
            self._runner.run(ask(self._client, conversation, answer))
            note = answer.summary()
        except KeyboardInterrupt:
            note = "stopped: " + answer.summary()
        except PenstockError as error:
            note = str(error)
        if answer.text:
            conversation.say("assistant", answer.text)
        else:
            conversation.turns.pop()  # Nothing was answered: the next try must not send the question twice.
        self._note(("\n" if answer.text else "") + note)

    def _note(self, text: str) -> None:
        self._out.print(text, style="dim", markup=False)
