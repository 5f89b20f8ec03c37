"""The step loop under its watchdog: wherever it hangs, and if it only turns without a step, the watchdog says
so.
"""

import threading
import time
from types import SimpleNamespace

import pytest

from penstock.clock import SystemClock
from penstock.engine.mailbox import DrainAsked, Mailbox
from penstock.engine.watchdog import StepWatch
from penstock.engine.worker import run_steps

TIMEOUT_S = 1.0  # The process itself ends if its threads do not run for twice as long.


class Core:
    """An engine whose steps are scripted: it has work until `over` is set."""

    sleep_s = None

    def __init__(self, over, step):
        self.over, self._step, self.number = over, step, 0

    @property
    def has_work(self):
        return not self.over.is_set()

    def use_idle_time(self):
        return False

    def drain(self):
        pass

    def step(self):
        self.number += self._step()
        return {}

    def stats(self):
        return SimpleNamespace(step=self.number)


def pause():
    time.sleep(0.02)
    return 0


def advance():
    time.sleep(0.02)
    return 1


def run(core, publish=lambda *_: None, flush=lambda: None):
    """Run the loop under a watch until it drains; what the watchdog said."""
    said, mailbox = [], Mailbox()

    def on_stall(words):
        said.append(words)
        core.over.set()

    mailbox.post(DrainAsked())
    watch = StepWatch(TIMEOUT_S, SystemClock(), on_stall)
    server = SimpleNamespace(publish=publish)
    try:
        run_steps(core, mailbox, server, SimpleNamespace(flush=flush), watch)
    finally:
        watch.close()
    return said


def test_turns_without_a_step_while_requests_wait_are_a_stall():
    (words,) = run(Core(threading.Event(), pause))
    assert "have not advanced" in words


@pytest.mark.parametrize("where", ["publish", "flush"])
def test_a_hang_beside_the_step_is_a_stall(where):
    core = Core(threading.Event(), advance)

    def hang(*_):
        assert core.over.wait(20), "the watchdog saw nothing"

    (words,) = run(core, **{where: hang})
    assert "have not advanced" in words


def test_steps_that_advance_are_none():
    core = Core(threading.Event(), advance)
    timer = threading.Timer(1.5 * TIMEOUT_S, core.over.set)
    timer.start()
    assert run(core) == []
    timer.join()


def test_sleep_is_none():
    core = Core(threading.Event(), advance)
    core.over.set()
    mailbox, said = Mailbox(), []
    watch = StepWatch(TIMEOUT_S, SystemClock(), said.append)
    timer = threading.Timer(1.5 * TIMEOUT_S, lambda: mailbox.post(DrainAsked()))
    timer.start()
    run_steps(
        core, mailbox, SimpleNamespace(publish=lambda *_: None), SimpleNamespace(flush=lambda: None), watch
    )
    timer.join()
    watch.close()
    assert said == []
