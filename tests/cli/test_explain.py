"""`penstock explain`: any request of the last hour, whichever process decided, and after a restart."""

import asyncio
import json
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from served import PATIENCE_S
from stand_in_thread import MODEL, Serve
from tenant_keys import add

from penstock.cli.main import main
from penstock.telemetry.decision_files import _hash, _matching
from penstock.types import RequestId

pytestmark = pytest.mark.timeout(240)
NUM_REQUESTS, SHOWN = 12, 4
TENANTS = {"acme": "weight: 1", "umbrella": "weight: 2"}


async def ids(gateway: Serve) -> list[str]:
    """Two tenants ask so often at once, each time on a connection of its own. Returns the ids of the
    answers.
    """
    clients = [gateway.client(tenant, fresh=True) for tenant in TENANTS]
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode()
    asked = (clients[number % 2].post("/completions", body) for number in range(NUM_REQUESTS))
    answers = await asyncio.gather(*asked)
    for client in clients:
        await client.close()
    return [json.loads(answer.body)["id"] for answer in answers]


def decided_by_two(gateway: Serve, place: Path) -> list[str]:
    """Some requests that one process placed, and some that the other one did: each writes to its own file."""
    asked = list[str]()

    def by_file() -> list[list[str]]:
        return [
            [each for each in asked if _matching(path, {_hash(RequestId(each))})] for path in place.glob("*")
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


def refused(gateway: Serve, place: Path) -> str:
    """Ask for what is not there; waits until its end is written. Returns the id of the request."""
    body = json.dumps({"model": "no-such-model", "prompt": "x"}).encode()
    headers = {"authorization": f"Bearer {gateway.keys['acme']}", "content-type": "application/json"}
    request = urllib.request.Request(f"{gateway.server.url}/completions", body, headers)
    with pytest.raises(urllib.error.HTTPError, match="404") as caught:
        urllib.request.urlopen(request, timeout=PATIENCE_S)
    request_id = caught.value.headers["x-request-id"]
    caught.value.close()
    wanted = {_hash(RequestId(request_id))}
    gateway.server.until(lambda: any(_matching(path, wanted) for path in place.glob("*")), "not written")
    return request_id


def test_any_process_explains_any_request_and_so_does_the_next_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "gateway"
    gateway = Serve(place, None, TENANTS, processes=2)
    admin = add(place / "keys.jsonl", tenant="acme", admin=True).key
    try:
        gateway.server.wait_ready()
        files = place / "state" / "ledger" / "decisions"
        names = decided_by_two(gateway, files)
        root = gateway.server.url.removesuffix("/v1")
        names[0] = names[0].replace("cmpl", "req")  # As the log and the header `x-request-id` have it.
        for name in names:  # The process that answers is the kernel's choice.
            argv = ["explain", name, "--replay", "--url", root, "--key", admin]
            assert main(argv) == 0, capsys.readouterr().err
            reported = capsys.readouterr().out
            assert f"1. {MODEL}: " in reported
            assert "replay: " in reported
            assert "equal to the bit" in reported
        names.append(refused(gateway, files))
        gateway.kill()
        gateway.start()
        gateway.server.wait_ready()
        root = gateway.server.url.removesuffix("/v1")
        for name in names:
            assert main(["explain", name, "--json", "--url", root, "--key", admin]) == 0
            reported = json.loads(capsys.readouterr().out)
            if name == names[-1]:
                assert reported["failure"]["status"] == 404
                assert "no-such-model" in reported["failure"]["message"]
                continue
            (decision,) = reported["decisions"]
            assert decision["request_id"] == name.replace("req", "cmpl")
            assert decision["replay"]["is_equal"]
        assert main(["explain", "cmpl-nobody", "--url", root, "--key", admin]) == 1
        assert "is known" in capsys.readouterr().err
    finally:
        gateway.kill()
