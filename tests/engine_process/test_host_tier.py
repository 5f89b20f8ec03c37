"""An idle session leaves the device by itself and comes back by copy, in a real worker."""

import subprocess
import sys
from pathlib import Path

import pytest
from raw_worker import REAL, Client, raw_worker, submit
from tiny_models import save, tiny_model

from penstock.protocol.worker import Ready, RequestFinished, Stats

SESSION, OTHER = tuple(range(100)), tuple(range(100, 200))
BLOCK_BYTES = 16 * 2 * 3 * 2 * 16 * 4  # Tokens, K and V, layers, heads, dimensions, float32.


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model("qwen3"), tmp_path_factory.mktemp("qwen3"))


def answer(client: Client, name: str, prompt: tuple[int, ...]) -> tuple[list[int], RequestFinished]:
    client.send(submit(name, prompt, temperature=0.0, max_tokens=8))
    outputs = list(client.outputs(name))
    finish = outputs[-1].finish
    assert finish is not None
    return [token for output in outputs for token in output.token_ids], finish


def test_a_worker_that_computes_sleeps_when_it_has_nothing_to_do(model: Path) -> None:
    """With everything that has a thread: the native pool, the one of overlapped steps, and the host
    tier's.
    """
    settings = {"host_kv_idle_s": 0.05, "threads": 2, "overlap": "on"}
    with raw_worker(model_path=str(model), runner=REAL, **settings) as worker:
        client = worker.connect()
        client.until_kind(Ready)
        answer(client, "first", SESSION)
        client.until(lambda message: isinstance(message, Stats) and message.host_stores >= 6)
        subprocess.run(
            [sys.executable, "-c", "pass"], check=True
        )  # Whoever told us of the copies goes to sleep, too.
        before = worker.context_switches()
        # A poller would wake while an unrelated process runs.
        subprocess.run([sys.executable, "-c", "pass"], check=True)
        assert worker.context_switches() - before <= 4


def test_an_idle_session_moves_to_the_host_and_back(model: Path) -> None:
    settings = {"kv_memory_bytes": 8 * BLOCK_BYTES, "host_kv_idle_s": 0.05, "dtype": "float32", "threads": 1}
    with raw_worker(model_path=str(model), runner=REAL, kernels="torch", **settings) as worker:
        client = worker.connect()
        ready = client.until_kind(Ready)
        assert isinstance(ready, Ready)
        assert (ready.info.num_blocks, ready.info.num_host_blocks > 100) == (8, True)
        first, finish = answer(client, "first", SESSION)
        assert finish.usage.cached_tokens == 0
        stored = client.until(lambda message: isinstance(message, Stats) and message.host_stores >= 6)
        assert isinstance(stored, Stats)
        assert (stored.running, stored.waiting) == (0, 0), "no request made it move"
        answer(client, "other", OTHER)  # Needs seven of the eight blocks.
        again, finish = answer(client, "again", SESSION)
        assert again == first
        assert finish.usage.cached_tokens == 96
        assert finish.usage.host_cached_tokens >= 80
