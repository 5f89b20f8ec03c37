"""Attacks on the promises of docs/failures.md over sockets, on this tree and on another one in turns.

    python -m bench.sockets.attacks [--rounds 2] [--attacks failing hanging stopping stopped_twice]
                                    --tree . OLD [--json FILE]

    failing        thirteen clients ask a model whose only provider answers 500; its fallback is idle
    hanging        the same where the provider's first byte takes 25 s and the client waits for 1 s
    stopping       SIGTERM while a stream runs; 0.3 s later a balancer looks and a client asks
    stopped_twice  SIGTERM, and again 0.4 s later, under six streams: tokens that clients got, and
                   tokens in the ledger once the server was started again

A tenant's flood beside another tenant is measured by bench/sockets/isolation.py.
"""

import argparse
import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from http_answers import Answer, begin, talk
from provider_process import ProviderProcess

from bench.harness import REPOSITORY, command_line, table, write_result
from bench.process import free_port

KEY = "sk-a-client-of-attacks-01"
CLIENTS, STREAMS, START_S, FIRST_BYTE_S = 13, 6, 60.0, 25.0
MODEL = str(REPOSITORY / "models" / "penstock-demo-mini")
OURS = {"path": MODEL, "name": "mini", "engine": {"threads": 1, "kv_memory_bytes": 1 << 26}}


class Served:
    """A `penstock serve` of one source tree."""

    def __init__(self, tree: Path, place: Path, *models: dict[str, Any], **sections: object) -> None:
        self.place, self.port, self._tree = place, free_port(), tree.resolve()
        config = {
            "models": [OURS, *models],
            "server": {"port": self.port},
            "auth": {"keys": [KEY]},
            "log": {"access": False},
            "ledger": {"directory": str(place / "ledger")},
            **sections,
        }
        (place / "config.yaml").write_text(json.dumps(config))  # JSON is YAML.
        self.start()

    def start(self) -> None:
        """Until it is ready."""
        environment = os.environ | {
            "PYTHONPATH": str(self._tree),
            "PENSTOCK_STATE_DIR": str(self.place / "state"),
        }
        with (self.place / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock", "serve", "-c", "config.yaml"],
                env=environment, stdout=log, stderr=log, cwd=self.place,
            )  # fmt: skip
        deadline = time.monotonic() + START_S
        while self.status("/ready") != "200":
            if time.monotonic() > deadline or self.process.poll() is not None:
                sys.exit(f"it did not start: {(self.place / 'log').read_text()[-2000:]}")
            time.sleep(0.05)

    def status(self, path: str, body: dict[str, Any] | None = None) -> str:
        """What a client meets."""
        try:
            return str(talk(self.port, path, body, KEY).status)
        except ConnectionRefusedError:
            return "connection refused"
        except OSError as error:
            return type(error).__name__

    def close(self) -> None:
        """Whatever it does."""
        self.process.kill()
        self.process.wait()


def chat(model: str, **fields: object) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "Count."}], "max_tokens": 8, **fields}


def beside_a_provider(tree: Path, place: Path, stack: contextlib.ExitStack, **faults: object) -> Served:
    """The model `big` is a provider's that behaves so, and falls back to `mini`."""
    provider = stack.enter_context(ProviderProcess())
    worker = {"url": provider.url, "engine": "openai", "served_model": "served", "max_model_len": 512}
    big = {"path": MODEL, "name": "big", "replicas": 0, "workers": [worker]}
    routing = {"models": [{"model": "big", "fallback": "mini"}]}
    served = Served(tree, place, big, routing=routing)
    stack.callback(served.close)
    provider.behaves(**faults)
    return served


def failing(tree: Path, place: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """See the module."""
    served = beside_a_provider(tree, place, stack, status=[500, {}, ""])
    found = Counter(served.status("/v1/chat/completions", chat("big")) for _ in range(CLIENTS))
    return {"clients": CLIENTS, "statuses": dict(found)}


def hanging(tree: Path, place: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """See the module."""
    served = beside_a_provider(tree, place, stack, delay_s=FIRST_BYTE_S)
    began, hasty = time.monotonic(), Answer(asked={"x-penstock-max-wait-ms": "1000"})
    answer = talk(served.port, "/v1/chat/completions", chat("big"), KEY, hasty)
    return {"status": answer.status, "seconds": round(time.monotonic() - began, 2)}


def stopping(tree: Path, place: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """See the module."""
    served = Served(tree, place)
    stack.callback(served.close)
    stream = begin(
        served.port, "/v1/chat/completions", chat("mini", stream=True, max_tokens=3000, ignore_eos=True), KEY
    )
    served.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    found = {path: served.status(path) for path in ("/health", "/ready")}
    found["a request"] = served.status("/v1/chat/completions", chat("mini"))
    return found | {"the stream ran on": not stream.ended.is_set() or stream.last == "[DONE]"}


def stopped_twice(tree: Path, place: Path, stack: contextlib.ExitStack) -> dict[str, Any]:
    """See the module."""
    served = Served(tree, place)
    stack.callback(lambda: served.close())
    body = chat("mini", stream=True, max_tokens=3000, ignore_eos=True, logprobs=True)
    streams = [begin(served.port, "/v1/chat/completions", body, KEY) for _ in range(STREAMS)]
    while min(stream.tokens for stream in streams) < 40:
        time.sleep(0.01)
    for pause_s in (0.4, 0.0):
        served.process.send_signal(signal.SIGTERM)
        time.sleep(pause_s)
    code = served.process.wait(START_S)
    for stream in streams:
        stream.ended.wait(START_S)
    typed = sum('"error"' in stream.last for stream in streams)
    served.start()  # What a build left unwritten is settled at its next start.
    served.process.send_signal(signal.SIGINT)
    served.process.wait(START_S)
    with sqlite3.connect(place / "ledger" / "usage.sqlite") as ledger:
        (settled,) = ledger.execute("SELECT sum(completion_tokens) FROM usage").fetchone()
    got = sum(stream.tokens for stream in streams)
    return {
        "exit code": code,
        "typed last events": typed,
        "tokens clients got": got,
        "in the ledger": settled,
    }


ATTACKS: dict[str, Callable[[Path, Path, contextlib.ExitStack], dict[str, Any]]] = {
    "failing": failing, "hanging": hanging, "stopping": stopping, "stopped_twice": stopped_twice,
}  # fmt: skip


def main() -> None:
    """Attack and print."""
    parser = command_line(__doc__, rounds=2)
    parser.add_argument("--attacks", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--tree", nargs="*", type=Path, default=[Path()])
    args: argparse.Namespace = parser.parse_args()
    rounds: list[dict[str, list[dict[str, Any]]]] = []
    rows: list[list[str]] = []
    for number in range(args.rounds):
        rounds.append({})
        for name in args.attacks:
            for index, tree in enumerate(args.tree):
                with tempfile.TemporaryDirectory(prefix="attacks-") as place, contextlib.ExitStack() as stack:
                    found = ATTACKS[name](tree, Path(place), stack)
                rounds[-1].setdefault(name, []).append({"tree": index, **found})
                rows.append([str(number), name, str(index), json.dumps(found)])
                print(rows[-1], flush=True)
    print(table(["round", "attack", "tree", "found"], rows))
    settings = {**vars(args), "tree": len(args.tree), "json": ""}
    write_result(args.json, {"settings": settings, "rounds": rounds})


if __name__ == "__main__":
    main()
