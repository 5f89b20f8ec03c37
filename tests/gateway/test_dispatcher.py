"""When flow control is asked again: after whatever may have made room, and not where nothing waits for it."""

import asyncio
import io
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from fake_backend import FakeBackend
from fleets import fleet_of

from penstock.backends.base import Delta, Finish, GenerateRequest
from penstock.clock import NS_PER_S, ManualClock
from penstock.config.ledger import BudgetsConfig, LedgerConfig, ModelPrice, PricesConfig
from penstock.config.routing import AdmissionConfig
from penstock.config.tree import LogConfig
from penstock.errors import EngineFault, StreamBroken
from penstock.gateway.dispatch.dispatcher import FEW, Dispatcher
from penstock.gateway.relay.reply import Context, Reply, StreamSlots
from penstock.policy.contracts import Budgets
from penstock.policy.flow import Outcome, RequestFacts, UsageRecord
from penstock.policy.lifecycle.control import FlowControl
from penstock.policy.lifecycle.policies import Policies
from penstock.policy.limits.budget import TenantBudgets
from penstock.policy.limits.price import PriceList
from penstock.policy.queueing.capacity import WorkerCapacity
from penstock.policy.queueing.pace import Pace
from penstock.policy.request import Request
from penstock.policy.resilience.anomalies import Anomalies
from penstock.policy.tenant import Tenant
from penstock.policy.terms import QueueTerms
from penstock.rng import IdSource
from penstock.telemetry.ledger import Ledger
from penstock.telemetry.ledger_recovery import read_journal
from penstock.telemetry.ledger_segment import Kind, decode_record, instance_directories
from penstock.telemetry.log import Log
from penstock.telemetry.metrics import Metrics
from penstock.types import RequestId, SamplingParams, TenantId

NEVER_S = 3600.0
SLICE = 64
NO_LEDGER = LedgerConfig(enabled=False)
TURNS = 4
"""Of the event loop: more than there are between an event and its consequences, and no time at all."""


class OnePrompt(Pace):
    """A worker computes one prompt at a time; and counts what was learned."""

    def __init__(self) -> None:
        super().__init__(AdmissionConfig())
        self.num_learned = 0

    def is_busy(self, worker: WorkerCapacity) -> bool:
        return worker.num_pending > 0

    def learn(self) -> None:
        self.num_learned += self.has_lesson
        super().learn()


class Silent(Reply):
    """Tells its client nothing."""

    __slots__ = ("on_complete",)

    def complete(self) -> None:
        assert self.error is None
        self.on_complete()

    def send_error(self, error: Exception) -> None:
        assert self.error is error


class Output:
    """The sink of a reply's only choice."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def on_delta(self, delta: Delta) -> None:
        self._reply.first_output()
        self._reply.count(len(delta.token_ids))

    def on_finish(self, finish: Finish) -> None:
        self._reply.choice_finished(0, finish)


class Desk:
    """A dispatcher in front of one worker, whose output the test plays."""

    def __init__(
        self,
        *,
        max_running: int = 4,
        ledger: LedgerConfig = NO_LEDGER,
        budgets: Budgets | None = None,
        **queue: float,
    ) -> None:
        self.clock = ManualClock()
        self.pace, log = OnePrompt(), Log(LogConfig(), self.clock, stream=io.StringIO())
        self.ledger, self.keeps_records = Ledger(ledger, self.clock, log), ledger.enabled
        prices = PriceList(PricesConfig(models=(ModelPrice(model="m", output=1.0),)))
        paid = {} if budgets is None else {"budgets": budgets, "prices": prices, "slice_tokens": SLICE}
        self.backend = FakeBackend(self.clock, step_s=NEVER_S, max_running=max_running)
        self.control = FlowControl(
            QueueTerms(**{"worker_credit": 0, "kept_share": 0, **queue}),
            Policies(pace=lambda: self.pace, **paid),
        )
        policies = SimpleNamespace(
            control=self.control,
            anomalies=Anomalies(NS_PER_S),
            limiter=SimpleNamespace(headers=lambda now_ns, tenant: ()),
            health=Policies().health,
            prices=PriceList(PricesConfig()),
            slice_tokens=SLICE,
            hedges=None,
            shed_kv_above=1.0,
        )
        self.dispatcher = Dispatcher(
            policies,
            fleet_of(self.clock, {"m": self.backend}),
            ledger=self.ledger,
            slots=StreamSlots(100),
            metrics=Metrics(["m"], version="test"),
            clock=self.clock,
            log=log,
        )
        self.num_looks = 0
        self.dispatcher.on_dispatched = self._looked
        self.answered: list[str] = []
        """Requests whose clients have their answer."""
        self.cut: list[str] = []
        """Requests whose connections were closed."""

    def _looked(self) -> None:
        self.num_looks += 1

    def _tell(self, name: str) -> None:
        assert not self.keeps_records or name in recorded(self.ledger), (
            f"{name} is answered before its record is written"
        )
        self.answered.append(name)

    async def ask(self, name: str, *, max_tokens: int = 9, **more: object) -> None:
        exchange = SimpleNamespace(
            request=None, trace=None, first_ns=None, first_usage=None, outcome=None, error=None,
            is_open=True, headers=(), cell="", migrated="", migration="", id=name,
            cut=partial(self.cut.append, name),
        )  # fmt: skip
        reply = Silent(
            Context(
                exchange=exchange, clock=self.clock, listener=self.dispatcher, head=None, ids=IdSource(seed=1)
            )
        )
        request = GenerateRequest(
            request_id=RequestId(name),
            prompt_token_ids=(1,) * 32,
            sampling=SamplingParams(max_tokens=max_tokens),
        )
        reply.on_complete = partial(self._tell, name)
        facts = RequestFacts(id=RequestId(name), route="m", prompt_tokens=32, max_tokens=max_tokens, **more)
        self.dispatcher.submit(facts, reply, [(request, Output(reply))], None)
        await turns()

    def step(self, name: str) -> None:
        """After a second the worker gives a token of this attempt."""
        self.clock.advance(NS_PER_S)
        self.backend._streams[RequestId(name)].step()

    @property
    def running(self) -> set[str]:
        """Attempts."""
        return set(self.backend._streams)


def recorded(ledger: Ledger) -> dict[str, UsageRecord]:
    """The ends that a gateway would leave behind which is killed now."""
    (journal,) = instance_directories(ledger.directory)
    ends = (decode_record(frame.body) for frame in read_journal(journal) if frame.kind == Kind.CLOSE)
    return {record.request_id: record for record in ends}


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


def on_a_loop(test):
    return lambda: asyncio.run(test())


@on_a_loop
async def test_the_room_that_a_first_output_makes_is_given_away_at_once() -> None:
    desk = Desk()
    await desk.ask("first")
    await desk.ask("second")
    assert desk.running == {"first"}, "the worker computes its prompt"
    desk.step("first")
    await turns()
    assert desk.running == {"first", "second"}
    looks = desk.num_looks
    desk.step("second")
    await turns()
    assert desk.num_looks == looks, "nothing waits for the room that this one makes"


@on_a_loop
async def test_so_is_that_of_the_first_output_of_an_answer_that_goes_on() -> None:
    desk = Desk()
    await desk.ask("first")
    desk.step("first")
    desk.backend.fail(RequestId("first"), StreamBroken("its connection broke"))
    await turns()
    await desk.ask("second")
    assert desk.running == {"first~2"}, "the worker computes its prompt again"
    desk.step("first~2")
    await turns()
    assert desk.running == {"first~2", "second"}


@on_a_loop
async def test_an_end_is_looked_at_only_where_something_waits_for_the_room() -> None:
    desk = Desk(max_running=1)
    await desk.ask("first", max_tokens=1)
    await desk.ask("second", max_tokens=1)
    looks = desk.num_looks
    desk.step("first")
    await turns()
    assert (desk.running, desk.num_looks) == ({"second"}, looks + 1)
    learned = desk.pace.num_learned
    desk.step("second")
    assert desk.pace.has_lesson, "its client has its answer first"
    await turns()
    assert (desk.num_looks, desk.pace.num_learned) == (looks + 1, learned + 1)


async def half_answered(desk: Desk, num: int) -> list[str]:
    """So many requests for whole answers of two tokens, each with its first; their names."""
    names = [f"r{i}" for i in range(num)]
    for name in names:
        await desk.ask(name, max_tokens=2, is_whole=True)
        desk.step(name)
        await turns()
    return names


def test_clients_of_whole_answers_hear_of_them_behind_their_records(tmp_path: Path) -> None:
    async def run() -> None:
        num = FEW + 4
        desk = Desk(max_running=num, ledger=LedgerConfig(directory=str(tmp_path)))
        await desk.ledger.start()
        names = await half_answered(desk, num)
        early, late = names[: num - FEW], names[-FEW:]
        for name in early:
            desk.step(name)
        assert not desk.answered, "others may end in this turn"
        await turns()
        assert desk.answered == early, "together, and in their order"
        for name in late:
            desk.step(name)
        assert desk.answered == early + late, "so few do not wait for others"
        await desk.ledger.stop()

    asyncio.run(run())


@pytest.mark.parametrize("num", [1, FEW + 4])
def test_no_client_waits_for_an_answer_whose_record_cannot_be_written(
    num: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        monkeypatch.undo()  # Once.
        raise ValueError("it is broken")

    async def run() -> None:
        desk = Desk(max_running=num, ledger=LedgerConfig(directory=str(tmp_path)))
        await desk.ledger.start()
        names = await half_answered(desk, num)
        cut = names[: max(1, num - FEW)]
        monkeypatch.setattr(desk.ledger._journal, "flush", broken)
        for name in cut:
            desk.step(name)
        await turns()
        assert (desk.cut, desk.answered) == (cut, [])
        assert set(recorded(desk.ledger)) == set(cut), "written a turn later"
        for name in names[len(cut) :]:
            desk.step(name)
        assert (desk.cut, desk.answered) == (cut, names[len(cut) :])
        await desk.ledger.stop()

    asyncio.run(run())


@pytest.mark.parametrize("is_whole", [False, True])
def test_an_end_that_cannot_be_told_is_recorded_as_failed(
    is_whole: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Request, "record", lambda request, wall_ns: {}["usage"])

    async def run() -> None:
        desk = Desk(ledger=LedgerConfig(directory=str(tmp_path)))
        await desk.ledger.start()
        await desk.ask("r", max_tokens=1, is_whole=is_whole)
        desk.step("r")
        assert desk.answered == ["r"]
        record = recorded(desk.ledger)["r"]
        assert (record.outcome, record.error) == (Outcome.FAILED, "KeyError")
        assert desk.ledger.statistics().open == 0
        await desk.ledger.stop()

    asyncio.run(run())


def test_the_record_of_an_answer_that_its_budget_ended_is_written_if_its_worker_fails_then(
    tmp_path: Path,
) -> None:
    async def run() -> None:
        desk = Desk(
            ledger=LedgerConfig(directory=str(tmp_path)),
            budgets=TenantBudgets(BudgetsConfig(), wall_offset_ns=0),
        )
        await desk.ledger.start()
        tenant = Tenant(id=TenantId("acme"), budget_month_micros=SLICE)
        await desk.ask("r", max_tokens=2 * SLICE, is_whole=True, tenant=tenant)
        stream = desk.backend._streams[RequestId("r")]
        stream.abort = lambda: None  # The worker hears of it later.
        for _ in range(SLICE):
            desk.step("r")
        request = desk.control.request(RequestId("r"))
        assert request is not None
        assert request.outcome is Outcome.FINISHED, "it is to end here"
        stream.break_off(EngineFault("it has failed"))
        assert recorded(desk.ledger)["r"].finish_reason == "budget"
        assert not desk.answered
        await desk.ledger.stop()

    asyncio.run(run())
