import contextlib
import io
import os
import pty
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
from scripted_endpoint import Script, StandIn

from penstock.cli.main import main
from penstock.cli.wiring.state import save_key

Scripted = Callable[[Script], tuple[str, StandIn]]
ANSWER = "The pipe brings water."
PATIENCE_S = 30.0


def test_one_question(scripted: Scripted, capsys: pytest.CaptureFixture[str]) -> None:
    url, server = scripted(Script())
    argv = [
        "chat",
        "What is it?",
        "--url",
        url,
        "--system",
        "Be brief.",
        "--temperature",
        "0",
        "--max-tokens",
        "9",
    ]
    assert main(argv) == 0
    assert capsys.readouterr() == (f"{ANSWER}\n", "")  # Nothing but the answer, for pipes.
    (request,) = server.requests
    assert request["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is it?"},
    ]
    assert (request["model"], request["temperature"], request["max_tokens"]) == ("scripted", 0, 9)


def test_a_question_from_standard_input(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, server = scripted(Script())
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat", "--url", url]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "one\ntwo\n"}]
    monkeypatch.setattr("sys.stdin", io.StringIO(" \n"))
    assert main(["chat", "--url", url]) == 2
    assert "standard input is empty" in capsys.readouterr().err


def test_without_a_server_it_says_how_to_start_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", "1")
    assert main(["chat", "hi"]) == 1
    err = capsys.readouterr().err
    assert "cannot connect to 127.0.0.1:1: connection refused" in err
    assert "start a server with: penstock serve" in err


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (Script(key="right"), "give the server's key with --key or PENSTOCK_API_KEY"),
        (Script(refuse_status=400, refuse_message="too long"), "the server refuses (HTTP 400): too long"),
        (Script(cut_after=2), "the server closed the connection"),
        (Script(error_after=2), "the answer broke off: the script says so"),
        (Script(models=()), "serves no model yet"),
    ],
)
def test_trouble_is_told(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], script: Script, complaint: str
) -> None:
    url, _ = scripted(script)
    assert main(["chat", "hi", "--url", url]) == 1
    assert complaint in capsys.readouterr().err


def test_keys_from_the_flag_the_environment_and_our_own_server(
    scripted: Scripted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, _ = scripted(Script(key="right"))
    assert main(["chat", "hi", "--url", url, "--key", "right"]) == 0
    monkeypatch.setenv("PENSTOCK_API_KEY", "right")
    assert main(["chat", "hi", "--url", url]) == 0
    monkeypatch.delenv("PENSTOCK_API_KEY")
    save_key("127.0.0.1", int(url.rsplit(":", 1)[1].split("/")[0]), "right")
    assert main(["chat", "hi", "--url", url]) == 0
    assert capsys.readouterr().out == f"{ANSWER}\n" * 3


class Terminal:
    """`penstock chat` with a terminal of its own."""

    def __init__(self, url: str) -> None:
        self._ours, theirs = pty.openpty()
        command = [sys.executable, "-m", "penstock", "chat", "--url", url]
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
        os.close(theirs)
        self.seen = ""

    def expect(self, text: str) -> str:
        """Read until `text` appears; everything up to it is consumed and given back."""
        while text not in self.seen:
            assert select.select([self._ours], [], [], PATIENCE_S)[0], f"no {text!r} in {self.seen!r}"
            try:
                data = os.read(self._ours, 4096)
            except OSError:  # How Linux says that the other end is closed.
                data = b""
            assert data, f"no {text!r} in {self.seen!r}"
            self.seen += data.decode(errors="replace")
        before, _, self.seen = self.seen.partition(text)
        return before

    def interrupt_prompt(self, answer: str) -> None:
        """Ctrl-C at the prompt until `answer` is seen, as a person would press it again.

        Readline loses a signal that arrives after its prompt is drawn and before it waits for input.
        """
        for _ in range(int(PATIENCE_S)):
            self.process.send_signal(signal.SIGINT)
            if answer in self.seen or select.select([self._ours], [], [], 1.0)[0]:
                break
        self.expect(answer)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        self.process.wait()
        os.close(self._ours)


@pytest.fixture
def terminal(scripted: Scripted) -> Iterator[Callable[[Script], tuple[Terminal, StandIn]]]:
    opened: list[Terminal] = []

    def start(script: Script) -> tuple[Terminal, StandIn]:
        url, server = scripted(script)
        opened.append(Terminal(url))
        return opened[-1], server

    yield start
    for one in opened:
        one.close()


OpenTerminal = Callable[[Script], tuple[Terminal, StandIn]]


def test_a_conversation(terminal: OpenTerminal) -> None:
    screen, server = terminal(Script())
    screen.expect("scripted at http://")
    screen.expect("\n> ")
    screen.type("first\n")
    screen.expect(ANSWER)
    screen.expect("5 tokens, first after ")
    screen.expect("\n> ")
    screen.type("second\n")
    screen.expect(ANSWER)
    screen.expect("\n> ")
    assert [message["content"] for message in server.requests[1]["messages"]] == ["first", ANSWER, "second"]

    screen.type("/system Be kind.\n")
    screen.expect("the system message is set")
    screen.expect("\n> ")
    screen.type("third\n")
    screen.expect(ANSWER)
    assert [message["content"] for message in server.requests[2]["messages"]] == ["Be kind.", "third"]
    screen.expect("\n> ")
    screen.type("/reset\n")
    screen.expect("starts over")
    screen.expect("\n> ")
    screen.type("/what\n")
    screen.expect("there is no /what")
    screen.expect("\n> ")
    screen.type("\x04")
    assert screen.process.wait(PATIENCE_S) == 0


def test_ctrl_c_stops_the_answer_not_the_program(terminal: OpenTerminal) -> None:
    screen, server = terminal(Script(words=("tick ",) * 10_000, gap_s=0.01))
    screen.expect("\n> ")
    screen.type("go\n")
    screen.expect("tick tick tick")
    screen.process.send_signal(signal.SIGINT)
    screen.expect("stopped: ")
    screen.expect("\n> ")
    screen.interrupt_prompt("(Ctrl-D or /quit leaves)")  # At the prompt it is not the end either.
    screen.expect("\n> ")
    screen.type("again\n")
    screen.expect("tick tick tick")
    screen.process.send_signal(signal.SIGINT)
    screen.expect("\n> ")
    said = [message["content"] for message in server.requests[1]["messages"]]
    assert said[0] == "go"
    assert said[1].startswith("tick tick tick")  # What was said before the stop is remembered.
    assert said[2] == "again"
    screen.type("/quit\n")
    assert screen.process.wait(PATIENCE_S) == 0
    assert server.hung_up >= 1


def test_control_characters_do_not_reach_a_terminal(terminal: OpenTerminal) -> None:
    screen, _ = terminal(Script(words=("a\x1b[2Jb", "\x07c\n", "d")))
    screen.expect("\n> ")
    screen.type("go\n")
    assert "\x1b[2J" not in screen.expect("3 tokens")


def test_a_failed_turn_leaves_the_conversation_usable(terminal: OpenTerminal) -> None:
    screen, server = terminal(Script(refuse_status=503, refuse_message="not now"))
    screen.expect("\n> ")
    screen.type("one\n")
    screen.expect("not now")
    screen.expect("\n> ")
    screen.type("two\n")
    screen.expect("not now")
    assert [message["content"] for message in server.requests[1]["messages"]] == ["two"]
