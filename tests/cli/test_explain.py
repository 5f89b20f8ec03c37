"""`penstock explain`: any request of the last hour, whichever process decided, and after a restart."""

import asyncio
import json
from pathlib import Path

import pytest
from stand_in_thread import MODEL, Serve, stand_in_engine
from tenant_keys import add

from penstock.cli.main import main
from penstock.telemetry.decision_files import _hash, _matching
from penstock.types import RequestId

pytestmark = pytest.mark.timeout(240)
NUM_REQUESTS, SHOWN = 12, 4


async def ids(gateway: Serve) -> list[str]:
    """Ask so often at once, each on a connection of its own."""
    client = gateway.client("acme", fresh=True)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode()
    answers = await asyncio.gather(*(client.post("/completions", body) for _ in range(NUM_REQUESTS)))
    await client.close()
    return [json.loads(answer.body)["id"] for answer in answers]


def decided_by_two(gateway: Serve, place: Path) -> list[str]:
    """Some requests that one process placed, and some that the other one did: each writes to its own file."""
    asked = list[str]()

    def by_file() -> list[list[str]]:
        return [
            [each for each in asked if _matching(path, _hash(RequestId(each)))] for path in place.glob("*")
        ]

    def are_all_written() -> bool:
        return sum(map(len, by_file())) == len(asked)

    for _ in range(20):
        asked += asyncio.run(ids(gateway))
        gateway.server.until(are_all_written, "decisions are not written")
        files = by_file()
        if len(files) == 2:
            one, other = files
            assert not set(one) & set(other)
            return [*one[:SHOWN], *other[:SHOWN]]
    raise AssertionError("one process placed every request")


def test_any_process_explains_any_request_and_so_does_the_next_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in_engine(step_s=0.01) as engine:
        place = tmp_path / "gateway"
        gateway = Serve(place, engine, {"acme": "weight: 1"}, processes=2)
        admin = add(place / "keys.jsonl", tenant="acme", admin=True).key
        try:
            gateway.server.wait_ready()
            names = decided_by_two(gateway, place / "state" / "ledger" / "decisions")
            root = gateway.server.url.removesuffix("/v1")
            for name in names:  # The process that answers is the kernel's choice.
                argv = ["explain", name, "--replay", "--url", root, "--key", admin]
                assert main(argv) == 0, capsys.readouterr().err
                told = capsys.readouterr().out
                assert f"1. {MODEL}: " in told
                assert "replay: " in told
                assert "equal to the bit" in told
            gateway.kill()
            gateway.start()
            gateway.server.wait_ready()
            root = gateway.server.url.removesuffix("/v1")
            for name in names:
                assert main(["explain", name, "--json", "--url", root, "--key", admin]) == 0
                (decision,) = json.loads(capsys.readouterr().out)["decisions"]
                assert decision["request_id"] == name
                assert decision["replay"]["is_equal"]
            assert main(["explain", "cmpl-nobody", "--url", root, "--key", admin]) == 1
            assert "is known" in capsys.readouterr().err
        finally:
            gateway.kill()
