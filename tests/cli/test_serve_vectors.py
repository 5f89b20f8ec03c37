"""Vectors of a real server, as the official client asks for them: which model gives some, who pays, and what
is refused.
"""

import base64
import json
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import numpy as np
import openai
import pytest
import torch
from served import Server
from tenant_keys import add
from vector_models import decoder, encoder, expected, write_words

from penstock.config.checkpoints import resolve

pytestmark = pytest.mark.timeout(300)

DEMO = resolve("penstock-demo-mini")
WORDS = [f"w{i}" for i in range(200)]
ADMIN = "sk-admin-of-these-tests"
TEXTS = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9 w10", "w1 w2 w3"]


class Place:
    """A server with a model that embeds, one that chats, and two tenants."""

    def __init__(self, place: Path) -> None:
        self.place = place
        directory = place / "checkpoint-7"
        self.model = decoder("qwen3", directory, "lasttoken", max_position_embeddings=64)
        config = json.loads((directory / "config.json").read_text())
        (directory / "config.json").write_text(json.dumps(config | {"matryoshka_dimensions": [16, 32, 48]}))
        self.words = write_words(directory, WORDS)
        self.ranker = encoder("bert", place / "cross", labels=1)
        self.pairs = write_words(place / "cross", WORDS, style="bert")
        keys = place / "keys.json"
        self.key, self.small = (add(keys, tenant=tenant).key for tenant in ("acme", "small"))
        engine = "dtype: float32, threads: 1, kv_memory_bytes: 16777216"
        self.ledger = place / "ledger"
        (place / "config.yaml").write_text(
            f"models:\n- {{path: {directory}, name: vectors, engine: {{{engine}, batch_delay_ms: 2}}}}\n"
            f"- {{path: {DEMO}, name: chat, engine: {{{engine}, step_tokens: 64}}}}\n"
            f"- {{path: {place / 'cross'}, name: ranker, engine: {{threads: 1}}}}\n"
            f"auth: {{keys_file: {keys}, admin_keys: [{ADMIN}]}}\n"
            f"tenants: [{{id: small, tokens_per_minute: 40}}]\n"
            f"ledger: {{directory: {self.ledger}}}\nserver: {{port: 0}}\n"
        )
        self.server = Server(place, "-c", str(place / "config.yaml"))
        self.server.wait_ready()

    def client(self, key: str = "") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.server.url, api_key=key or self.key, max_retries=0)

    def post(self, path: str, key: str = "", **body: object) -> httpx2.Response:
        headers = {"authorization": f"Bearer {key or self.key}"}
        return httpx2.post(f"{self.server.url}{path}", json=body, headers=headers, timeout=60)

    def right(self, texts: list[str]) -> torch.Tensor:
        return expected(self.model, [self.words.encode(text).ids for text in texts], "lasttoken")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(tmp_path_factory.mktemp("vectors"))
    yield place
    place.server.close()


def test_every_way_to_ask(served: Place) -> None:
    right = served.right(TEXTS)
    ids = [served.words.encode(text).ids for text in TEXTS]
    with served.client() as client:
        # The client itself asks for base64 where no format is given.
        for given in (TEXTS, ids):
            answer = client.embeddings.create(model="vectors", input=given)
            found = torch.tensor([each.embedding for each in answer.data])
            torch.testing.assert_close(found, right, atol=1e-5, rtol=0)
            assert [each.index for each in answer.data] == [0, 1, 2, 3]
            assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(map(len, ids))
            assert answer.model == "vectors"
        for given in (TEXTS[0], ids[0]):
            answer = client.embeddings.create(model="vectors", input=given, encoding_format="float")
            torch.testing.assert_close(torch.tensor(answer.data[0].embedding), right[0], atol=1e-5, rtol=0)
        short = client.embeddings.create(model="vectors", input=TEXTS, dimensions=16)
        cut = torch.nn.functional.normalize(right[:, :16])
        torch.testing.assert_close(
            torch.tensor([each.embedding for each in short.data]), cut, atol=1e-5, rtol=0
        )
    raw = served.post("/embeddings", model="vectors", input=TEXTS[0], encoding_format="base64").json()
    number = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), "<f4")
    torch.testing.assert_close(torch.tensor(number), right[0], atol=1e-5, rtol=0)


def test_what_was_decided_is_found_by_the_ids_that_clients_see(served: Place) -> None:
    body = {"text_1": "w1", "text_2": "w2"}
    for path, asked in (("/embeddings", {"input": "w1"}), ("/score", body)):
        answer = served.post(path, model="vectors", **asked)
        names = {answer.headers["x-request-id"], answer.json().get("id", answer.headers["x-request-id"])}
        for name in names:
            url = f"{served.server.url.removesuffix('/v1')}/admin/requests/{name}"
            assert httpx2.get(url, headers={"authorization": f"Bearer {served.key}"}).status_code == 403
            found = httpx2.get(url, headers={"authorization": f"Bearer {ADMIN}"}).json()
            assert [each["worker"] for each in found["decisions"]] == [found["request"]["worker"]], found


def test_a_request_tells_its_prefill_chunks_and_when_its_limits_were_asked(served: Place) -> None:
    with served.client() as client:
        answer = client.completions.create(model="chat", prompt=[5] * 150, max_tokens=4)
    url = f"{served.server.url.removesuffix('/v1')}/admin/requests/{answer.id}"
    reported = httpx2.get(url, headers={"authorization": f"Bearer {ADMIN}"}).json()["request"]
    assert (reported["prefill_chunks"], reported["computed_tokens"]) == (3, 150)
    moments = [
        reported[name] for name in ("limits_ms", "admitted_ms", "dispatched_ms", "ttft_ms", "total_ms")
    ]
    assert moments == sorted(moments)
    assert 0 <= reported["worker_queue_ms"] <= reported["ttft_ms"] - reported["dispatched_ms"]


def test_cut_to_what_the_model_takes(served: Place) -> None:
    long = " ".join(WORDS[:100])
    with served.client() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            client.embeddings.create(model="vectors", input=["w1", long])
        assert refused.value.code == "context_length_exceeded"
        assert "entry 1 of 'input' has 101" in str(refused.value)
        answer = client.embeddings.create(
            model="vectors", input=long, extra_body={"truncate_prompt_tokens": -1}
        )
    assert answer.usage.prompt_tokens == 64
    right = served.right([" ".join(WORDS[:63])])  # And `<eos>`, which is not what is cut off.
    torch.testing.assert_close(torch.tensor([answer.data[0].embedding]), right, atol=1e-5, rtol=0)


def test_scores_are_cosines(served: Place) -> None:
    query, documents = "w1 w2", ["w4", "w1 w2", "w5 w6"]
    rows = served.right([query, *documents])
    cosines = (rows[1:] @ rows[0]).tolist()
    score = served.post("/score", model="vectors", text_1=query, text_2=documents).json()
    assert [each["score"] for each in score["data"]] == pytest.approx(cosines, abs=1e-5)
    pairs = served.post("/score", model="vectors", text_1=documents, text_2=documents).json()
    assert [each["score"] for each in pairs["data"]] == pytest.approx([1.0] * 3, abs=1e-6)
    order = sorted(range(3), key=lambda i: -cosines[i])
    for path in ("/rerank", "/../rerank"):
        found = served.post(path, model="vectors", query=query, documents=documents, top_n=2).json()
        assert [each["index"] for each in found["results"]] == order[:2]
        assert found["results"][0]["document"] == {"text": "w1 w2"}
        assert found["results"][0]["relevance_score"] == pytest.approx(1.0, abs=1e-6)
    plain = served.post(
        "/rerank", model="vectors", query=query, documents=[{"text": "w4"}], return_documents=False
    ).json()
    assert "document" not in plain["results"][0]
    assert plain["usage"]["total_tokens"] == 5


def test_a_cross_encoder_reads_pairs(served: Place) -> None:
    query, documents = "w1 w2", ["w4 w5 w6", "w1 w2", "w7"]
    right: list[float] = []
    for document in documents:
        pair = served.pairs.encode(query, document)
        with torch.inference_mode():
            types = torch.tensor([pair.type_ids])
            right.append(
                float(served.ranker(torch.tensor([pair.ids]), token_type_ids=types).logits.sigmoid())
            )
    score = served.post("/score", model="ranker", text_1=query, text_2=documents).json()
    assert [each["score"] for each in score["data"]] == pytest.approx(right, abs=1e-5)
    found = served.post("/rerank", model="ranker", query=query, documents=documents).json()
    assert [each["index"] for each in found["results"]] == sorted(range(3), key=lambda i: -right[i])
    refused = served.post("/embeddings", model="ranker", input="w1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "model")
    long = " ".join(WORDS)
    refused = served.post("/rerank", model="ranker", query="w1", documents=[long])
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    cut = served.post("/rerank", model="ranker", query="w1", documents=[long], truncate_prompt_tokens=-1)
    assert cut.json()["usage"]["total_tokens"] == 200


def test_a_long_query_with_many_documents_takes_no_memory(served: Place) -> None:
    """It stands in each of the pairs: tokenized with each, 200 KB of it took 6 GB and most of a minute."""
    body = {"model": "ranker", "query": "w1 " * 30_000, "documents": ["w2"] * 300, "top_n": 1}
    refused = served.post("/rerank", **body)
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    assert "entry 0 of 'documents' has 30004" in refused.text
    cut = served.post("/rerank", **body, truncate_prompt_tokens=6)
    assert cut.json()["usage"]["total_tokens"] == 300 * 6
    status = Path(f"/proc/{served.server.process.pid}/status").read_text()
    assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 500_000


WRONG = {
    "nothing": ({"input": []}, "input"),
    "empty": ({"input": ""}, "input"),
    "one is empty": ({"input": ["w1", ""]}, "input[1]"),
    "no tokens": ({"input": [[1], []]}, "input[1]"),
    "a mixture": ({"input": ["w1", [1]]}, "input"),
    "a number": ({"input": 7}, "input"),
    "an unknown token": ({"input": [[3, 211]]}, "input"),
    "too many": ({"input": ["w1"] * 2049}, "input"),
    "no such format": ({"input": "w1", "encoding_format": "int8"}, "encoding_format"),
    "no such size": ({"input": "w1", "dimensions": 17}, "dimensions"),
    "a size of nothing": ({"input": "w1", "dimensions": 0}, "dimensions"),
    "a cut to more than there is": ({"input": "w1", "truncate_prompt_tokens": 65}, "truncate_prompt_tokens"),
    "what nobody knows": ({"input": "w1", "stream": True}, "stream"),
    "of a model that chats": ({"model": "chat", "input": "w1"}, "model"),
    "of no model": ({"model": "none", "input": "w1"}, "model"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bad_input_is_refused_by_name(served: Place, name: str) -> None:
    body, param = WRONG[name]
    refused = served.post("/embeddings", **({"model": "vectors"} | body))
    assert refused.status_code == (404 if name == "of no model" else 400), refused.text
    assert refused.json()["error"]["param"] == param


def test_bad_lists_of_texts(served: Place) -> None:
    for path, body, param in (
        ("/rerank", {"query": "w1", "documents": []}, "documents"),
        ("/rerank", {"query": "", "documents": ["w1"]}, "query"),
        ("/rerank", {"query": "w1", "documents": ["w1"] * 2048}, "documents"),
        ("/rerank", {"query": "w1", "documents": ["w1"], "top_n": -1}, "top_n"),
        ("/rerank", {"query": "w1", "documents": [" ".join(WORDS)]}, "documents"),
        ("/score", {"text_1": ["w1", "w2"], "text_2": ["w1", "w2", "w3"]}, "text_1"),
        ("/score", {"text_1": "w1", "text_2": ["w1", ""]}, "text_2[1]"),
    ):
        refused = served.post(path, model="vectors", **body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_no_chat_with_a_model_that_embeds(served: Place) -> None:
    with served.client() as client:
        for ask in (
            lambda: client.chat.completions.create(
                model="vectors", messages=[{"role": "user", "content": "w1"}]
            ),
            lambda: client.completions.create(model="vectors", prompt="w1"),
            lambda: client.responses.create(model="vectors", input="w1"),
        ):
            with pytest.raises(openai.BadRequestError) as refused:
                ask()
            assert refused.value.param == "model"
            assert "'vectors' generates no text" in str(refused.value)
        tasks = {model.id: model.model_extra["task"] for model in client.models.list().data}
        assert tasks == {"vectors": "embed", "chat": "generate", "ranker": "score"}


def test_limits_and_the_ledger(served: Place) -> None:
    many = ["w1 w2 w3 w4"] * 6
    with served.client(served.small) as client:
        client.embeddings.create(model="vectors", input=many)
        with pytest.raises(openai.RateLimitError):
            client.embeddings.create(model="vectors", input=many)
    with served.client() as client:
        assert len(client.embeddings.create(model="vectors", input=["w1"] * 2048).data) == 2048

    def rows() -> list[tuple]:
        with closing(sqlite3.connect(f"file:{served.ledger / 'usage.sqlite'}?mode=ro", uri=True)) as database:
            return database.execute(
                "select endpoint, served_model, prompt_tokens, completion_tokens, outcome from usage "
                "where tenant = 'small'"
            ).fetchall()

    served.server.until(rows, "no row")
    assert rows() == [("embeddings", "vectors", 30, 0, "finished")]
