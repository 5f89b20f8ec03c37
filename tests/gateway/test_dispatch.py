"""A request's life through real sockets: waiting, starting late, retries, limits, budgets, and its one
record.
"""

import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import msgspec
import openai
import pytest

from penstock.clock import NS_PER_S, SystemClock
from penstock.config.ledger import LedgerConfig, ModelPrice, PricesConfig
from penstock.config.routing import ModelRoute, RoutingConfig
from penstock.config.tenancy import TenantConfig
from penstock.gateway.identity.api_keys import edit_keys, issue
from penstock.policy.terms import QueueTerms
from penstock.telemetry.ledger import USER_CHARS_MAX

DAY_S = 24 * 3600


@pytest.fixture
def tenant(kit, tmp_path):
    """Makes a config with tenant "acme", which has these limits, and a key of it."""

    def make(**limits):
        issued = issue(SystemClock().wall_ns() // 10**9, tenant="acme")
        path = tmp_path / "keys"
        edit_keys(path, lambda before: ([*before, issued.record], None))
        config = kit.replace(kit.make_config(), auth={"keys_file": str(path)})
        return msgspec.structs.replace(config, tenants=(TenantConfig(id="acme", **limits),)), issued.key

    return make


def usage_rows(directory):
    """The ledger's records, as the database has them."""
    with closing(sqlite3.connect(directory / "usage.sqlite")) as connection:
        connection.row_factory = sqlite3.Row
        return [dict(row) for row in connection.execute("SELECT * FROM usage ORDER BY ended_ns")]


def ask(kit, running, *, key=None, **fields):
    with kit.openai_client(running, key or kit.KEY) as client:
        return client.chat.completions.create(**kit.chat(max_tokens=8, **fields))


def test_what_has_no_room_waits_and_is_started_late(kit, start) -> None:
    config = kit.replace(kit.make_config(), queue={"worker_credit": 0}, admission=kit.NO_PROMISES)
    running = start(config, step_s=0.005, max_running=2)
    limit, stop = 0, threading.Event()

    def watch() -> None:
        nonlocal limit
        while not stop.wait(0.001):
            limit = max(limit, running.backend.num_streams)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda _: ask(kit, running), range(8)))
    stop.set()
    watcher.join()
    assert [answer.usage.completion_tokens for answer in answers] == [8] * 8
    assert 1 <= limit <= 2


def test_a_wait_that_is_too_long_ends_with_503_and_a_time_to_come_back(kit, start) -> None:
    bands = tuple(msgspec.structs.replace(band, timeout_s=0.05) for band in QueueTerms().bands)
    config = kit.replace(kit.make_config(), queue={"worker_credit": 0, "bands": bands})
    running = start(config, step_s=0.2, max_running=1)
    holder = kit.openai_client(running)
    stream = holder.chat.completions.create(**kit.chat(stream=True, max_tokens=100))
    next(iter(stream))
    with pytest.raises(openai.APIStatusError) as refused:
        ask(kit, running)
    assert refused.value.status_code == 503
    assert int(refused.value.response.headers["retry-after"]) >= 1
    stream.close()
    running.wait_until(lambda: running.gateway.num_accepted == 0)


def test_a_client_that_leaves_the_queue_never_reaches_a_worker(kit, start) -> None:
    config = kit.replace(kit.make_config(), queue={"worker_credit": 0})
    running = start(config, step_s=0.05, max_running=1)
    holder = kit.openai_client(running)
    stream = holder.chat.completions.create(**kit.chat(stream=True, max_tokens=200))
    next(iter(stream))
    waiting = kit.Raw(running).send(kit.post("/v1/chat/completions", kit.chat()))
    running.wait_until(lambda: running.gateway.num_accepted == 2)
    waiting.close()
    running.wait_until(lambda: running.gateway.num_accepted == 1)
    stream.close()
    running.wait_until(lambda: running.gateway.num_accepted == 0)
    assert len(running.requests) == 1


def test_a_request_whose_worker_died_unseen_is_started_again(kit, start) -> None:
    running = start(step_s=0.2)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, kit, running)
        running.wait_until(lambda: running.backend.num_streams == 1)
        running.call(running.backend.lose_worker)
        running.wait_until(lambda: running.backend.num_streams == 0)
        running.call(running.backend.recover)
        assert answer.result(20).usage.completion_tokens == 8
    assert len(running.requests) == 2


def test_a_request_waits_for_a_worker_that_comes_back_and_not_for_ever(kit, start) -> None:
    running = start(kit.replace(kit.make_config(), queue={"no_worker_wait_s": 0.1}))
    running.call(running.backend.lose_worker)
    with pytest.raises(openai.APIStatusError) as refused:
        ask(kit, running)
    assert refused.value.status_code == 503
    assert refused.value.response.json()["error"]["code"] == "worker_unavailable"


def test_rate_limits_refuse_with_their_headers_and_settle_on_what_was_used(kit, start, tenant) -> None:
    config, key = tenant(requests_per_minute=2, tokens_per_minute=10_000)
    running = start(config)
    with kit.openai_client(running, key) as client:
        asked = client.chat.completions.with_raw_response.create(**kit.chat(max_tokens=8))
        assert asked.headers["x-ratelimit-limit-requests"] == "2"
        assert asked.headers["x-ratelimit-remaining-requests"] == "1"
        assert int(asked.headers["x-ratelimit-remaining-tokens"]) < 10_000
        client.chat.completions.create(**kit.chat(max_tokens=8))
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**kit.chat(max_tokens=8))
    assert 1 <= int(refused.value.response.headers["retry-after"]) <= 60
    assert refused.value.response.headers["x-ratelimit-remaining-requests"] == "0"
    assert "requests per minute" in str(refused.value)


def test_a_budget_stops_a_running_stream_at_a_slice(kit, start, tenant) -> None:
    prices = PricesConfig(models=(ModelPrice(model="*", output=1000.0),))  # A token costs a thousandth.
    config, key = tenant(budget_per_day=0.6)
    running = start(msgspec.structs.replace(config, prices=prices))
    with kit.openai_client(running, key) as client:
        answer = client.chat.completions.create(**kit.chat(max_tokens=5000))
        assert answer.choices[0].finish_reason == "budget"
        assert 256 <= answer.usage.completion_tokens <= 600 + 256
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(**kit.chat(max_tokens=5000))
    error = refused.value
    assert (error.status_code, error.type, error.code) == (429, "insufficient_quota", "insufficient_quota")
    assert "daily budget" in str(error)
    left_s = DAY_S - running.clock.wall_ns() // 10**9 % DAY_S  # The budget is of the UTC day.
    off_s = (int(error.response.headers["retry-after"]) - left_s) % DAY_S
    assert min(off_s, DAY_S - off_s) <= 60


def test_every_accepted_request_has_one_record_with_how_it_ended(kit, start, tenant, tmp_path) -> None:
    prices = PricesConfig(models=(ModelPrice(model="tiny", input=1.0, output=2.0),))
    config, key = tenant(requests_per_minute=3)
    ledger = LedgerConfig(directory=str(tmp_path / "ledger"))
    running = start(msgspec.structs.replace(config, prices=prices, ledger=ledger), step_s=0.01)
    answer = ask(kit, running, key=key, user="someone")
    ask(kit, running, key=key, n=2)
    long = kit.chat(stream=True, max_tokens=1000, user="u" * 5000)
    left = kit.openai_client(running, key).chat.completions.create(**long)
    next(iter(left))
    (request,) = running.gateway._dispatcher.control.requests()
    assert len(request.facts.user) == USER_CHARS_MAX, "a client may write as much as a body holds"
    left.close()
    running.wait_until(lambda: running.gateway.num_accepted == 0)
    with pytest.raises(openai.RateLimitError):
        ask(kit, running, key=key)  # Never accepted: it leaves no record.
    running.stop()
    first, second, third = usage_rows(tmp_path / "ledger")
    assert first["request_id"] == answer.id
    assert (first["tenant"], first["user"], first["outcome"], first["finish_reason"]) == (
        "acme", "someone", "finished", "length",
    )  # fmt: skip
    assert first["prompt_tokens"] == answer.usage.prompt_tokens
    assert first["cost_micros"] == answer.usage.prompt_tokens + 2 * 8
    assert (second["choices"], second["completion_tokens"]) == (2, 16)
    assert third["outcome"] == "cancelled"
    assert third["completion_tokens"] >= 1


LARGE_TO_SMALL = RoutingConfig(models=(ModelRoute(model="tiny", fallback="small"),))


def test_when_the_large_model_is_full_the_small_one_answers_and_says_so(kit, start) -> None:
    config = kit.replace(kit.make_config(), queue={"worker_credit": 0}, admission={"ttft_target_ms": 0})
    config = msgspec.structs.replace(config, routing=LARGE_TO_SMALL)
    running = start(config, step_s=0.05, max_running=1, small=True)
    with kit.openai_client(running) as client, ThreadPoolExecutor(4) as pool:
        holder = client.chat.completions.create(**kit.chat(stream=True, max_tokens=200))
        next(iter(holder))
        waiting = [pool.submit(ask, kit, running) for _ in range(2)]
        running.wait_until(lambda: running.gateway.num_accepted == 3)
        bands = running.gateway._dispatcher.control.model_queue("tiny").queue.bands
        running.wait_until(lambda: max(band.gap_ns(running.clock.now_ns()) for band in bands) > NS_PER_S)
        hurried = {"x-penstock-max-wait-ms": "500"}
        answer = client.chat.completions.with_raw_response.create(
            **kit.chat(max_tokens=2), extra_headers=hurried
        )
        assert answer.headers["x-penstock-model"] == "small"
        assert answer.headers["x-penstock-requested-model"] == "tiny"
        assert answer.headers["x-penstock-downgrade"] == "slo"
        assert answer.parse().model == "small"
        with pytest.raises(openai.RateLimitError) as refused:
            client.chat.completions.create(
                **kit.chat(max_tokens=2), extra_headers={**hurried, "x-penstock-degrade": "never"}
            )
        assert int(refused.value.response.headers["retry-after"]) >= 1
        holder.close()
        assert [future.result(20).model for future in waiting] == ["tiny", "tiny"]


def test_machine_time_is_shared_out_to_the_requests(kit, start, tmp_path) -> None:
    prices = PricesConfig(accelerators={"*": 3600.0})  # A millionth is a microsecond.
    config = msgspec.structs.replace(
        kit.make_config(), prices=prices, ledger=LedgerConfig(directory=str(tmp_path / "ledger"))
    )
    running = start(config, step_s=0.02)
    ask(kit, running)
    running.stop()
    (row,) = usage_rows(tmp_path / "ledger")
    ran_us, steps_us = row["total_us"] - row["queue_us"], 8 * 20_000
    assert 0.5 * steps_us < row["accelerator_cost_micros"] <= 1.5 * ran_us
