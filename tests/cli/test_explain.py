"""`penstock explain`: any request of the last hour, whichever process decided, and after a restart."""

import asyncio
import json
import os
import time
from pathlib import Path

import pytest
from stand_in_thread import MODEL, Serve, stand_in_engine
from tenant_keys import add

from penstock.cli.main import main

pytestmark = pytest.mark.timeout(240)
NUM_REQUESTS = 24


async def ids(gateway: Serve) -> list[str]:
    """Ask so often at once, each on a connection of its own."""
    client = gateway.client("acme", fresh=True)
    body = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 2}).encode()
    answers = await asyncio.gather(*(client.post("/completions", body) for _ in range(NUM_REQUESTS)))
    await client.close()
    return [json.loads(answer.body)["id"] for answer in answers]


def test_any_process_explains_any_request_and_so_does_the_next_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with stand_in_engine(step_s=0.01) as engine:
        place = tmp_path / "gateway"
        gateway = Serve(place, engine, {"acme": "weight: 1"}, processes=2)
        admin = add(place / "keys.jsonl", tenant="acme", admin=True).key
        try:
            gateway.server.wait_ready()
            place_of_files, names = place / "state" / "ledger" / "decisions", list[str]()
            for _ in range(20):
                names += asyncio.run(ids(gateway))
                time.sleep(1)  # They are written half a second late.
                files = list(place_of_files.iterdir())
                if len(files) == 2:
                    break
            assert len(files) == 2, "both processes decided"
            names = names[:4] + names[-20:]
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
            assert os.stat(files[0]).st_size < 256 * 1024
        finally:
            gateway.kill()
