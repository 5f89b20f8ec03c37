"""`GET /health`: what it says while engines load, hang, end and come back."""

import json

import pytest

from penstock.backends.base import Phase
from tests.gateway.test_inspect import fetch


def health(running):
    status, _, body = fetch(running, "/health")
    return status, json.loads(body)


def test_a_model_that_works_is_ok(gateway):
    assert health(gateway) == (200, {"status": "ok", "models": [{"name": "tiny", "status": "ok"}]})


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.LOADING, Phase.WARMING, Phase.LOST])
def test_what_comes_by_itself_is_degraded_and_alive(start, phase):
    running = start()
    running.call(lambda: running.backend.show(phase, "restart 1 in 2 s"))
    status, answer = health(running)
    assert (status, answer["status"]) == (200, "degraded")
    (reason,) = answer["models"][0]["reasons"]
    assert "restart 1 in 2 s" in reason
    assert fetch(running, "/ready")[0] == 503


@pytest.mark.parametrize(
    ("phase", "words"), [(Phase.DOWN, "5 restarts were in vain"), (Phase.SUSPECT, "no answer for 30 s")]
)
def test_an_engine_that_is_down_for_good_or_hangs_is_told(start, phase, words):
    running = start()
    running.call(lambda: running.backend.show(phase, words))
    status, answer = health(running)
    assert (status, answer["status"]) == (503, "down")
    assert words in answer["models"][0]["reasons"][0]


def test_an_engine_that_answers_again_is_healthy_again(start):
    running = start()
    running.call(lambda: running.backend.show(Phase.SUSPECT, "no answer"))
    assert health(running)[0] == 503
    running.call(lambda: running.backend.show(Phase.READY, "ready"))
    assert health(running)[1]["status"] == "ok"
