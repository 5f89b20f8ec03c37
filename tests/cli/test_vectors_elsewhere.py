"""Requests for vectors behind two gateway processes, one of whose workers dies in the middle of them: every
caller gets all vectors, the right ones, and is charged once.
"""

import os
import signal
import sqlite3
import threading
from contextlib import closing
from pathlib import Path

import httpx2
import openai
import pytest
import torch
from served import Server
from vector_models import decoder, expected, write_words

pytestmark = pytest.mark.timeout(300)

ADMIN = "sk-admin-of-these-tests"
KEYS = ("sk-acme-of-these-tests", "sk-globex-of-these-tests")
WORDS = [f"w{i}" for i in range(50)]
NUM_TEXTS = 600


def engines(server: Server) -> list[int]:
    """Its workers' processes, among those of its gateways."""
    return [pid for pid in server.workers if b"engine.worker" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def texts_of(number: int) -> list[str]:
    return [" ".join(f"w{(number * 7 + i * k) % 50}" for k in range(12)) for i in range(NUM_TEXTS)]


def test_a_worker_dies_in_the_middle(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoint-7"
    model = decoder("qwen3", directory, "mean")
    words = write_words(directory, WORDS)
    (tmp_path / "config.yaml").write_text(
        f"models:\n- {{path: {directory}, name: vectors, replicas: 2, engine: {{dtype: float32, threads: 1, "
        f"kv_memory_bytes: 16777216}}}}\n"
        f"auth: {{admin_keys: [{ADMIN}], keys: [{', '.join(KEYS)}]}}\n"
        f"admission: {{ttft_target_ms: 60000}}\n"
        f"ledger: {{directory: {tmp_path / 'ledger'}}}\nserver: {{port: 0, processes: 2}}\n"
    )
    server = Server(tmp_path, "-c", str(tmp_path / "config.yaml"))
    try:
        server.wait_ready()
        found: dict[int, torch.Tensor | Exception] = {}

        def ask(number: int, key: str) -> None:
            try:
                with openai.OpenAI(base_url=server.url, api_key=key, max_retries=0) as client:
                    answer = client.embeddings.create(model="vectors", input=texts_of(number))
                found[number] = torch.tensor([each.embedding for each in answer.data])
            except Exception as error:  # noqa: BLE001 - it is compared below.
                found[number] = error

        keys = KEYS * 3
        threads = [threading.Thread(target=ask, args=each) for each in enumerate(keys)]
        for thread in threads:
            thread.start()
        url = f"{server.url.removesuffix('/v1')}/admin/workers"

        def busy() -> list[str]:
            reported = httpx2.get(url, headers={"authorization": f"Bearer {ADMIN}"}).json()["workers"]
            return [each["id"] for each in reported if each["running"] or each["waiting"]]

        server.until(busy, "no worker is ever busy")
        os.kill(engines(server)[0], signal.SIGKILL)
        server.wait_said("the worker was killed by SIGKILL; restart 1")
        for thread in threads:
            thread.join(120)
        for number in range(len(keys)):
            right = expected(model, [words.encode(text).ids for text in texts_of(number)[:40]], "mean")
            assert isinstance(found.get(number), torch.Tensor), (found.get(number), server.err.read_text())
            assert found[number].shape == (NUM_TEXTS, right.shape[1])
            torch.testing.assert_close(found[number][:40], right, atol=1e-5, rtol=0)

        def rows() -> list[tuple]:
            with closing(
                sqlite3.connect(f"file:{tmp_path / 'ledger/usage.sqlite'}?mode=ro", uri=True)
            ) as database:
                return database.execute("select prompt_tokens, outcome from usage").fetchall()

        server.until(lambda: len(rows()) >= len(keys), "a row is missing")
        num_tokens = NUM_TEXTS * len(words.encode(texts_of(0)[0]).ids)
        assert rows() == [(num_tokens, "finished")] * len(keys)
    finally:
        server.close()
