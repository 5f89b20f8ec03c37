"""The step loop under its watchdog: wherever it hangs, and if it only turns without a step, the watchdog says
so.
"""

import threading
import time
from types import SimpleNamespace

import pytest

from penstock.clock import NS_PER_S, ManualClock
from penstock.engine.mailbox import DrainAsked, Mailbox, StepWatch
from penstock.engine.worker import run_steps

TIMEOUT_S = 4.0
"""By a clock that only the tests move. By the machine's, the watchdog looks eight times as often, and this
process ends if its threads do not run for twice as long."""
TIMEOUT_NS = int(TIMEOUT_S * NS_PER_S)


class Core:
    """An engine whose steps are scripted: each takes a quarter of the timeout, and it has work until `over`
    is set.
    """

    sleep_s = rest_s = adapters = None
    gathers_s = 0.0
    num_held = 0

    def __init__(self, advances=1):
        self.over, self.clock = threading.Event(), ManualClock()
        self.number, self._advances = 0, advances

    @property
    def has_work(self):
        return not self.over.is_set()

    def use_idle_time(self):
        return False

    def take_mail(self, mail):
        assert isinstance(mail, DrainAsked)

    def step(self):
        time.sleep(0.01)
        self.clock.advance(TIMEOUT_NS // 4)
        self.number += self._advances
        return {}

    @property
    def num_steps(self):
        return self.number

    def stats(self):
        return SimpleNamespace(step=self.number)

    due_stats = stats


def run(core, publish=lambda *_: None, flush=lambda: None):
    """Run the loop under a watch until it drains; what the watchdog said."""
    said, mailbox = [], Mailbox()

    def on_stall(words):
        said.append(words)
        core.over.set()

    mailbox.post(DrainAsked())
    watch = StepWatch(TIMEOUT_S, core.clock, on_stall)
    server = SimpleNamespace(publish=publish)
    try:
        run_steps(core, mailbox, server, SimpleNamespace(flush=flush), watch)
    finally:
        watch.close()
    return said


def test_turns_without_a_step_while_requests_wait_are_a_stall():
    (words,) = run(Core(advances=0))
    assert "have not advanced" in words


@pytest.mark.parametrize("where", ["publish", "flush"])
def test_a_hang_beside_the_step_is_a_stall(where):
    core = Core()

    def hang(*_):
        core.clock.advance(2 * TIMEOUT_NS)
        assert core.over.wait(20), "the watchdog saw nothing"

    (words,) = run(core, **{where: hang})
    assert "have not advanced" in words


def test_steps_that_advance_are_none():
    core = Core()

    def end():
        while core.clock.now_ns() < 4 * TIMEOUT_NS:
            time.sleep(0.01)
        core.over.set()

    timer = threading.Timer(TIMEOUT_S / 3, end)  # The watchdog looks twice meanwhile.
    timer.start()
    assert run(core) == []
    timer.join()


def test_sleep_is_none():
    core = Core()
    core.over.set()
    mailbox, said = Mailbox(), []
    watch = StepWatch(TIMEOUT_S, core.clock, said.append)

    def let_time_pass():
        core.clock.advance(2 * TIMEOUT_NS)
        time.sleep(TIMEOUT_S / 4)  # The watchdog looks meanwhile.
        mailbox.post(DrainAsked())

    timer = threading.Timer(TIMEOUT_S / 8, let_time_pass)
    timer.start()
    run_steps(
        core, mailbox, SimpleNamespace(publish=lambda *_: None), SimpleNamespace(flush=lambda: None), watch
    )
    timer.join()
    watch.close()
    assert said == []
