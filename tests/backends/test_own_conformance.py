"""The conformance suite against a real worker process with a scripted runner."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvloop
from conformance import BackendConformance
from scripted_worker import bench

from penstock.backends.own import OwnBackend
from penstock.fleet.launchers.supervised import SupervisedWorker


class TestOwnBackend(BackendConformance):
    loop_factory = staticmethod(uvloop.new_event_loop)  # As in production.
    worker: SupervisedWorker

    @asynccontextmanager
    async def open(self) -> AsyncIterator[OwnBackend]:
        async with bench() as made:
            self.worker = await made.start()
            await self.worker.wait_ready()
            yield self.worker.backend

    async def lose_worker(self, backend: OwnBackend) -> None:
        assert self.worker.pid is not None
        os.kill(self.worker.pid, 9)
