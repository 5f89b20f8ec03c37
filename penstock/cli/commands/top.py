"""`penstock top`: the fleet, live.

The fleet as `penstock top` shows it: rates from two reports, and tables. Pure, but for the look of it.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from penstock.bench.client import EndpointError
from penstock.cli import console
from penstock.cli.commands.remote import FleetClient, add_admin_flags, connect_admin
from penstock.cli.console import Column, Fitted, Row, printable, row
from penstock.cli.flags import Commands, Help, number
from penstock.clock import NS_PER_S, Clock, SystemClock, sleep
from penstock.protocol.fleet import FleetReport, ModelReport, WorkerReport

STYLES = {
    "ready": "green",
    "suspect": "yellow",
    "draining": "yellow",
    "gone": "red",
}
"""Other states are on their way, and need no colour."""


class WorkerRow(WorkerReport, frozen=True, kw_only=True):
    """A worker, and how fast it is."""

    tokens_per_s: float | None = None
    """Since the report before; null if none was reported."""


class ModelRow(ModelReport, frozen=True, kw_only=True):
    """A model, and how long answers take to begin."""

    running: int = 0
    tokens_per_s: float = 0.0
    ttft_s: float | None = None
    """Mean of the answers that began since the report before; null if none did."""


class FleetView(msgspec.Struct, frozen=True, kw_only=True):
    """The content of the screen at one time."""

    version: str
    workers: list[WorkerRow]
    models: list[ModelRow]


def view_of(now: FleetReport, before: FleetReport | None, seconds: float) -> FleetView:
    """A report with what has changed since the one `seconds` before it."""
    old_workers = {(worker.id, worker.epoch): worker for worker in before.workers} if before else {}
    old_models = {model.name: model for model in before.models} if before else {}
    workers = [
        WorkerRow(
            **msgspec.structs.asdict(worker),
            tokens_per_s=_rate(worker, old_workers.get((worker.id, worker.epoch)), seconds),
        )
        for worker in now.workers
    ]
    models = [_model_row(model, old_models.get(model.name), workers) for model in now.models]
    return FleetView(version=now.version, workers=workers, models=models)


def _model_row(model: ModelReport, old: ModelReport | None, workers: Sequence[WorkerRow]) -> ModelRow:
    mine = [worker for worker in workers if worker.model == model.name]
    count = model.ttft_count - old.ttft_count if old is not None else 0
    grown_s = model.ttft_sum_s - old.ttft_sum_s if old is not None else 0.0
    return ModelRow(
        **msgspec.structs.asdict(model),
        running=sum(worker.running or 0 for worker in mine),
        tokens_per_s=sum(worker.tokens_per_s or 0.0 for worker in mine),
        ttft_s=grown_s / count if count > 0 else None,
    )


def _rate(now: WorkerReport, old: WorkerReport | None, seconds: float) -> float | None:
    if old is None or now.generated_tokens is None or old.generated_tokens is None or seconds <= 0:
        return None
    return max(0, now.generated_tokens - old.generated_tokens) / seconds


def tables(view: FleetView, where: str, trouble: str = "") -> RenderableType:
    """For people: a head line, the models, the workers; `trouble` is why there is nothing newer."""
    ready = sum(worker.state == "ready" for worker in view.workers)
    head = _text(f"{where}  penstock {view.version}  {ready} of {len(view.workers)} workers ready")
    parts: list[RenderableType] = [head]
    if trouble:
        parts.append(_text(trouble, "red"))
    parts += [Text(), _model_table(view.models), Text(), _worker_table(view.workers)]
    parts += [_text(f"{worker.id}: {worker.notes[-1]}", "dim") for worker in view.workers if worker.notes]
    return Group(*parts)


def _model_table(models: Sequence[ModelRow]) -> Fitted:
    columns = [Column(head="model", right=False)]
    ranks = {"workers": 0, "queued": 0, "running": 2, "tokens/s": 1, "TTFT": 3}
    columns += [Column(head=head, rank=rank) for head, rank in ranks.items()]
    rows: list[Row] = []
    for model in models:
        ttft = "-" if model.ttft_s is None else f"{model.ttft_s * 1000:,.0f} ms"
        counts = (f"{model.ready}/{model.workers}", f"{model.waiting:,}", f"{model.running:,}")
        rows.append(row(model.name, *counts, f"{model.tokens_per_s:,.0f}", ttft))
    return Fitted(columns, rows)


def _worker_table(workers: Sequence[WorkerRow]) -> Fitted:
    columns = [Column(head="worker", right=False), Column(head="engine", right=False, rank=6)]
    columns.append(Column(head="state", right=False))
    ranks = {"run": 0, "wait": 0, "KV": 2, "tokens/s": 1, "heard": 5, "restarts": 3}
    columns += [Column(head=head, rank=rank) for head, rank in ranks.items()]
    return Fitted(columns, [_worker_row(worker) for worker in workers])


def _worker_row(worker: WorkerRow) -> Row:
    """The worker's activity, if it is more than its state says, stands on a line below."""
    tells = worker.state != "ready" and worker.stage not in ("", worker.state)
    away = f"a peer cell, {worker.rtt_ms:,.3g} ms away" if worker.rtt_ms is not None else ""
    state, style = worker.state, STYLES.get(worker.state, "")
    if worker.left_alone:
        state, style = "left alone", "red"
    return row(
        worker.id,
        worker.engine,
        _text(state, style),
        _count(worker.running),
        _count(worker.waiting),
        _share(worker.kv_blocks_used, worker.kv_blocks_total),
        _count(None if worker.tokens_per_s is None else round(worker.tokens_per_s)),
        "-" if worker.age_s is None else f"{worker.age_s:,.0f} s",
        str(worker.restarts),
        below=worker.stage if tells else worker.left_alone or away,
    )


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _share(used: int | None, total: int | None) -> str:
    return "-" if used is None or not total else f"{100 * used / total:.0f}%"


def _text(said: str, style: str = "") -> Text:
    """Words of others: no markup, and nothing that steers a terminal."""
    return Text(printable(said), style=style)


DESCRIPTION = """\
Show the fleet, live: every model with its queue, every worker with its state and its load.

Needs an admin key (auth.admin_keys, `penstock keys create --admin`); the key that `penstock serve`
makes for itself is one, and is found if it runs on this machine."""

EPILOG = """\
columns:
  queued     requests in this gateway's queue; run, wait: on the worker
  tokens/s   generated since the last look; TTFT: mean of the answers that began since then
  KV         share of the KV cache that running requests use
  heard      since the last report of the worker; -: there was none

states:
  starting, loading, warming, ready, asleep, waking, suspect (it does not answer as it should),
  draining, gone;
  left alone: ready, but its breaker is open or it has no room, so it is given nothing or little

Ctrl-C ends it. Where standard output is no terminal it looks once.
exit code: 0 also after Ctrl-C, 1 no server or no answer, 2 wrong usage

examples:
  penstock top
  penstock top --once
  penstock top --json --interval 10 >> fleet.jsonl
  penstock top --url http://gpu-box:8000 --key sk-..."""


def add_parser(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Add this command."""
    parser = commands.add_parser(
        "top",
        help="show the fleet, live",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=Help,
        allow_abbrev=False,
    )
    add_admin_flags(parser)
    parser.add_argument(
        "--interval",
        type=number(float, 0.1, 3600),
        default=1.0,
        metavar="S",
        help="seconds between two looks (1)",
    )
    parser.add_argument("--once", action="store_true", help="look once (twice, for rates) and exit")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each look, for machines")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Carry out `penstock top`."""
    try:
        asyncio.run(_Top(args, SystemClock()).run())
    except KeyboardInterrupt:
        return 0  # That is how one leaves.
    return 0


class _Top:
    def __init__(self, args: argparse.Namespace, clock: Clock) -> None:
        self._fleet: FleetClient = connect_admin(args)
        self._where: str = args.url or "fleet"
        self._interval_s: float = args.interval
        self._json: bool = args.json
        self._once: bool = args.once or not (args.json or sys.stdout.isatty())
        self._clock = clock
        self._last: FleetReport | None = None
        self._last_ns = 0

    async def run(self) -> None:
        try:
            await self._look()  # A refused user reads why before the screen is ours.
            await sleep(self._interval_s)
            if self._once or self._json:
                await self._print()
            else:
                await self._show()
        finally:
            await self._fleet.close()

    async def _print(self) -> None:
        while True:
            view = await self._look()
            if self._json:
                sys.stdout.write(msgspec.json.encode(view).decode() + "\n")
                sys.stdout.flush()
            else:
                console.out().print(tables(view, self._where))
            if self._once:
                return
            await sleep(self._interval_s)

    async def _show(self) -> None:
        """Until Ctrl-C. A server that goes away is waited for, with what was known last."""
        screen = console.out()
        with Live(console=screen, screen=True, auto_refresh=False) as live:
            view: FleetView | None = None
            while True:
                trouble = ""
                try:
                    view = await self._look()
                except EndpointError as error:
                    trouble = str(error).partition("\n")[0]
                if view is not None:
                    live.update(tables(view, self._where, trouble), refresh=True)
                await sleep(self._interval_s)

    async def _look(self) -> FleetView:
        report, now_ns = await self._fleet.report(), self._clock.now_ns()
        view = view_of(report, self._last, (now_ns - self._last_ns) / NS_PER_S)
        self._last, self._last_ns = report, now_ns
        return view
