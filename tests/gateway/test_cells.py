"""Two gateways that are cells, each with a worker of one row, on the wire between them."""

import asyncio
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest
from fake_backend import WORDS
from free_port import free_port

from penstock.backends.base import Phase
from penstock.config.cells import CellConfig, CellsConfig
from penstock.config.tree import Config
from penstock.errors import ConfigError
from penstock.fleet.cells import cell_key, peer_cells
from penstock.kv.hashing import PromptKeyMaker, PromptKeys

NUM_TOKENS = 24


@dataclass(slots=True)
class Pair:
    """Two cells."""

    east: Any
    west: Any
    kit: Any

    def ask(self, *, stream: bool = False, key: str = "", **headers: str) -> httpx2.Response:
        body = {"model": "tiny", "prompt": "Tell me", "max_tokens": NUM_TOKENS, "seed": 3, "stream": stream}
        said = {"authorization": f"Bearer {key or self.kit.KEY}"}
        said |= {name.replace("_", "-"): value for name, value in headers.items()}
        return httpx2.post(f"{self.east.url}/v1/completions", json=body, headers=said, timeout=60)

    def peer(self) -> Any:
        return self.east.registry.get("cell:west/tiny")

    def records(self, cell: Any) -> list[tuple[str, ...]]:
        path = Path(cell.config.ledger.directory) / "usage.sqlite"
        with closing(sqlite3.connect(path)) as connection:
            wanted = "tenant, worker, origin, origin_id, request_id, completion_tokens, outcome"
            return connection.execute(f"SELECT {wanted} FROM usage").fetchall()


@pytest.fixture
def pair(kit: Any, start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setenv("PENSTOCK_CELL_KEY", "the-key-of-all-cells")
    listed = tuple(
        CellConfig(name=name, url=f"tcp:127.0.0.1:{free_port()}", labels=labels)
        for name, labels in (("east", ("eu",)), ("west", ("us",)))
    )
    config = kit.replace(kit.make_config(), admission=kit.NO_PROMISES)
    made = {
        name: start(
            msgspec.structs.replace(config, cells=CellsConfig(here=name, all=listed)),
            words=WORDS,
            max_running=1,
            step_s=0.002,
        )
        for name in ("east", "west")
    }
    east = made["east"]

    async def join() -> None:
        (peer,) = peer_cells(east.config.cells, "tiny", east.tokenizer, east.clock)
        east.registry.add(await peer.open(east.registry))

    asyncio.run_coroutine_threadsafe(join(), east.loop).result(30)
    found = Pair(east, made["west"], kit)
    east.wait_until(lambda: found.peer() is not None and found.peer().is_ready)
    return found


def test_a_guest_is_answered_as_it_would_be_at_home(pair: Pair) -> None:
    here, there = pair.ask(), pair.ask(x_penstock_residency="us")
    assert "x-penstock-cell" not in here.headers
    assert there.headers["x-penstock-cell"] == "west"
    assert there.json()["choices"] == here.json()["choices"]
    assert there.json()["usage"] == here.json()["usage"]
    streamed = pair.ask(stream=True, x_penstock_residency="us").text
    assert streamed.rstrip().endswith("data: [DONE]")
    (request,) = [each for each in pair.west.requests if each.guest is None][:1]
    assert len(request.prompt_token_ids) == len("Tell me"), "it travels as tokens"


def test_a_guest_has_names_of_blocks_only_where_there_is_a_choice(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    makers, make = list[PromptKeyMaker](), PromptKeyMaker.keys

    def noted(maker: PromptKeyMaker, *args: Any, **kwargs: Any) -> PromptKeys:
        makers.append(maker)
        return make(maker, *args, **kwargs)

    monkeypatch.setattr(PromptKeyMaker, "keys", noted)
    assert pair.ask(x_penstock_residency="us").headers["x-penstock-cell"] == "west"
    assert len(makers) == 1, "the east chooses among its worker and its peer; the west has one worker"


def test_logprobs_travel_by_their_tokens(pair: Pair) -> None:
    body = {"model": "tiny", "prompt": "Tell me", "max_tokens": 4, "seed": 3, "logprobs": 2}
    headers = {"authorization": f"Bearer {pair.kit.KEY}"}
    both = [
        httpx2.post(f"{pair.east.url}/v1/completions", json=body, headers=headers | more, timeout=60).json()
        for more in ({}, {"x-penstock-residency": "us"})
    ]
    assert both[0]["choices"][0]["logprobs"]["tokens"] == both[1]["choices"][0]["logprobs"]["tokens"]


def test_one_bill_and_both_ledgers_know_it(pair: Pair) -> None:
    answer = pair.ask(x_penstock_residency="us").json()
    pair.east.wait_until(lambda: pair.records(pair.east))
    pair.west.wait_until(lambda: pair.records(pair.west))
    (own,), (guest,) = pair.records(pair.east), pair.records(pair.west)
    assert own[1:5] == ("cell:west/tiny", "", "", answer["id"])
    assert guest[:4] == (own[0], "tiny-0", "east", answer["id"])
    assert own[5] == guest[5] == NUM_TOKENS


def test_a_client_that_leaves_ends_its_guest(pair: Pair) -> None:
    body = pair.kit.post(
        "/v1/completions",
        {"model": "tiny", "prompt": "x", "max_tokens": 400, "stream": True},
        "x-penstock-residency: us",
    )
    raw = pair.kit.Raw(pair.east)
    raw.send(body).read_until(b"data: ")
    assert pair.west.call(lambda: pair.west.backend.num_streams) == 1
    raw.close()
    pair.west.wait_until(lambda: not pair.west.backend.num_streams)
    pair.east.wait_until(lambda: not pair.peer().backend.num_streams)
    assert pair.ask(x_penstock_residency="us").status_code == 200


def test_a_cell_without_workers_says_so_and_one_that_is_gone_breaks_nothing(pair: Pair) -> None:
    pair.west.call(lambda: pair.west.backend.lose_worker())
    pair.east.wait_until(lambda: pair.peer().backend.status.phase is Phase.LOADING)
    assert "no worker" in pair.east.call(lambda: pair.peer().backend.status.stage)
    assert pair.ask().status_code == 200
    pair.west.call(lambda: pair.west.backend.recover())
    pair.east.wait_until(lambda: pair.peer().is_ready)
    pair.west.stop()
    pair.east.wait_until(lambda: not pair.peer().is_ready)
    assert pair.ask().status_code == 200
    refused = pair.ask(x_penstock_residency="us", x_penstock_max_wait_ms="200")
    assert refused.status_code == 503, "it is bound to a cell that is gone"


def test_a_lost_worker_over_there_is_made_good_here(pair: Pair) -> None:
    """The stream began at the peer, whose worker dies: it goes on here behind its last token."""
    expected = pair.ask().json()["choices"][0]["text"]
    pair.east.call(lambda: pair.east.backend.lose_worker())
    pair.west.call(lambda: setattr(pair.west.backend, "_step_s", 0.05))
    raw = pair.kit.Raw(pair.east)
    body = {"model": "tiny", "prompt": "Tell me", "max_tokens": NUM_TOKENS, "seed": 3, "stream": True}
    raw.send(pair.kit.post("/v1/completions", body, "Connection: close")).read_until(b"data: ")
    pair.east.call(lambda: pair.east.backend.recover())
    pair.west.call(lambda: pair.west.backend.lose_worker())
    answer = raw.read_all().decode()
    raw.close()
    events = [msgspec.json.decode(line[6:]) for line in answer.split("\n") if line.startswith("data: {")]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text
    assert expected.endswith(text)
    assert not any("error" in event for event in events)


def test_who_is_bound_stays_whatever_the_request_says(pair: Pair, kit: Any) -> None:
    assert pair.ask(x_penstock_residency="us, eu").status_code == 400, "no cell has both"
    wrong = pair.ask(x_penstock_residency="a b")
    assert wrong.status_code == 400
    assert "labels of cells" in wrong.json()["error"]["message"]


def test_cells_need_a_key_of_some_length(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = CellsConfig(here="a", key_env="OUR_KEY", all=(CellConfig(name="a", url="tcp:127.0.0.1:1"),))
    with pytest.raises(ConfigError, match="OUR_KEY is not set"):
        cell_key(cells)
    monkeypatch.setenv("OUR_KEY", "short")
    with pytest.raises(ConfigError, match="shorter than 16"):
        cell_key(cells)
    assert Config().cells.own is None
