"""The conformance suite against a real tritonserver, which answers letters from a python model that
streams.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from byte_tokenizer import byte_tokenizer
from conformance import Requests
from engine_stand_ins import StandIn, until
from test_external_conformance import TestTriton as TritonConformance
from test_external_conformance import tools

from penstock.backends.base import Backend
from penstock.backends.http.backend import ExternalWorker, HttpBackend
from penstock.backends.http.external import make_backend
from penstock.errors import WorkerUnavailable

pytestmark = [pytest.mark.workers, pytest.mark.timeout(600)]


class TestRealTriton(TritonConformance):
    urls: tuple[str, str]
    server = StandIn()  # Nobody's: only its empty list of requests is looked at.

    @pytest.fixture(autouse=True)
    def of_triton(self, triton_urls: tuple[str, str]) -> None:
        type(self).urls = triton_urls

    @asynccontextmanager
    async def open(self) -> AsyncIterator[HttpBackend]:
        url, metrics_url = self.urls
        worker = ExternalWorker(
            engine="triton", url=url, metrics_url=metrics_url, model="letters", max_model_len=32768
        )
        backend = make_backend(worker, byte_tokenizer(), tools())
        backend.open()
        try:
            await until(lambda: backend.status.ready, timeout_s=60)
            yield backend
        finally:  # Also where a test is skipped: uvloop does not end with connections that are open.
            await backend.close()

    test_a_lost_worker_ends_every_stream_with_its_kind = (
        None  # The tests share the server; stand-ins are killed.
    )

    def test_its_metrics_are_read(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            await until(lambda: backend.status.stats is not None, timeout_s=30)
            assert not [note for note in backend.status.notes if "metrics" in note.text]

        self.run(check)

    def test_a_model_that_is_not_there_is_said(self) -> None:
        async def check(backend: Backend, requests: Requests) -> None:
            worker = ExternalWorker(engine="triton", url=self.urls[0], model="nonsuch", max_model_len=100)
            other = make_backend(worker, byte_tokenizer(), tools())
            other.open()
            await until(lambda: "nonsuch" in other.status.stage, timeout_s=30)
            with pytest.raises(WorkerUnavailable, match="nonsuch"):
                other.generate(requests.make(), None)
            await other.close()

        self.run(check)
