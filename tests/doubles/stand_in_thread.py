"""`penstock serve` processes in front of our engine, launched by each or shared by all, or of a stand-in on a
thread of its own, with which a gateway is up within a second.
"""

import asyncio
import contextlib
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from engine_stand_ins import StandIn, VllmStandIn
from paced_runner import RUNNER
from raw_worker import REAL, RawWorker, raw_worker
from served import COMMAND, Server
from tenant_keys import add

from penstock.bench.client import ApiAddress, Client, ClientLimits
from penstock.config.checkpoints import resolve
from penstock.protocol.worker import Ready

MODEL = "m"


@contextlib.contextmanager
def stand_in_engine(step_s: float = 0.0) -> Iterator[StandIn]:
    """A vLLM that answers from a script, on a free port."""
    loop, engine = asyncio.new_event_loop(), VllmStandIn(step_s=step_s)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(engine.start(), loop).result(10)
    try:
        yield engine
    finally:
        asyncio.run_coroutine_threadsafe(engine.kill(), loop).result(10)
        asyncio.run_coroutine_threadsafe(_rest(), loop).result(10)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()


@contextlib.contextmanager
def shared_engine(rows: int = 0, *, pace: str = "") -> Iterator[RawWorker]:
    """A worker of ours that is ready, at an address, for several servers: our engine with a demo model, in a
    process of its own. `rows`: so many answers at once; 0: its default. `pace`: a `Pace`'s directory.
    """
    bounds = {"max_running": rows} if rows else {}
    with raw_worker(
        model_path=str(resolve("penstock-demo-mini")), model_name=MODEL, runner=RUNNER if pace else REAL,
        gate=pace, threads=1, kv_memory_bytes=1 << 26, **bounds,
    ) as worker:  # fmt: skip
        looks = worker.connect()
        looks.until_kind(Ready)
        looks.close()  # Else what it says to everybody would wait here, unread.
        yield worker


async def _rest() -> None:
    """Wait for whatever ends because its connection did."""
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


def serve_with(constants: Mapping[str, float]) -> Sequence[str]:
    """`penstock serve` with other constants than the product's: dotted name of each -> value."""
    lines = ["import sys", "from penstock.cli.main import main"]
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        lines += [f"import {module} as module", f"module.{name} = {value}"]
    return sys.executable, "-c", "\n".join([*lines, "sys.exit(main(sys.argv[1:]))"]), "serve"


class Serve:
    """`penstock serve`, started and killed as often as wanted; all tenants have a key. `engine`: a stand-in,
    or a worker of ours that others use too; None: it launches one.
    """

    def __init__(
        self,
        place: Path,
        engine: StandIn | RawWorker | None,
        tenants: dict[str, str],
        *sections: str,
        port: int = 0,
        processes: int = 1,
        command: Sequence[str] = COMMAND,
        lameduck_s: float = 0.0,
        drain_timeout_s: float = 1.0,
        worker: str = "",
    ) -> None:
        """`tenants` and `worker`: what the configuration says of each of them, in YAML's flow style;
        `sections`: more lines of it.
        """
        self._command = command
        place.mkdir(exist_ok=True, parents=True)
        self._place, self.config = place, place / "penstock.yaml"
        keys = place / "keys.jsonl"
        self.keys = {name: add(keys, tenant=name).key for name in tenants}
        serves = f"engine: {{threads: 1, kv_memory_bytes: 33554432, {worker}}}"
        if isinstance(engine, RawWorker):
            serves = f"replicas: 0, workers: [{{url: '{engine.address}', engine: penstock, {worker}}}]"
        elif engine is not None:
            worker = f"{{url: '{engine.url}', engine: vllm, served_model: {engine.MODEL}, {worker}}}"
            serves = f"replicas: 0, workers: [{worker}]"
        times = f"lameduck_s: {lameduck_s}, drain_timeout_s: {drain_timeout_s}"
        self._lines = [
            f"server: {{port: {port}, trust_local: true, processes: {processes}, {times}}}",
            f"auth: {{keys_file: {keys}, secret: {'x' * 20}}}",
            "log: {access: false}",
            f"models: [{{path: penstock-demo-mini, name: {MODEL}, {serves}}}]",
            *sections,
        ]
        if not any(section.startswith("admission:") for section in sections):
            # A busy machine must not turn requests away for its own slowness.
            self._lines.append("admission: {ttft_target_ms: 0}")
        self.write(tenants)
        self.start()

    def write(self, tenants: dict[str, str]) -> None:
        """What the next start or SIGHUP reads."""
        entries = ", ".join(f"{{id: {name}, {facts}}}" for name, facts in tenants.items())
        self.config.write_text("\n".join([*self._lines, f"tenants: [{entries}]"]))

    def start(self, *argv: str) -> None:
        """Does not wait until it is ready."""
        self.server = Server(
            self._place,
            "-c",
            str(self.config),
            *argv,
            command=self._command,
            PENSTOCK_STATE_DIR=str(self._place / "state"),
        )

    def client(self, tenant: str, *, fresh: bool = False) -> Client:
        """A client with that tenant's key; `fresh`: a connection of its own for each request."""
        limits = ClientLimits(idle_connections_max=0) if fresh else None
        return Client(ApiAddress.parse(self.server.url), key=self.keys[tenant], limits=limits)

    def metric(self, name: str) -> float:
        """The sum of a metric's samples."""
        text = asyncio.run(self._metrics())
        return sum(
            float(line.rpartition(" ")[2])
            for line in text.splitlines()
            if line.split("{")[0].split(" ")[0] == name
        )

    async def _metrics(self) -> str:
        at = ApiAddress.parse(self.server.url)
        client = Client(ApiAddress(at.scheme, at.host, at.port, ""))
        try:
            return (await client.get("/metrics")).body.decode()
        finally:
            await client.close()

    def reload(self, tenants: dict[str, str]) -> None:
        """Say something else of the tenants, and let it take that."""
        said = "the new configuration is in force"
        before = self.server.err.read_text().count(said)
        self.write(tenants)
        self.server.process.send_signal(signal.SIGHUP)
        self.server.until(lambda: self.server.err.read_text().count(said) > before, "it does not reload")

    def kill(self) -> None:
        """SIGKILL, and reaped."""
        self.server.close()
