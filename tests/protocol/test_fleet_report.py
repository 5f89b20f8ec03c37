"""`GET /admin/workers` and the body of a drain order, as another version of us or a person with curl writes
them.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.protocol.fleet import DrainOrder, FleetReport, ModelReport, WorkerReport

WORKER = WorkerReport(
    id="w", model="m", engine="vllm", state="ready", running=3, age_s=0.5, notes=["started"]
)
REPORT = FleetReport(
    version="1", workers=[WORKER], models=[ModelReport(name="m", waiting=1, ready=1, workers=1)]
)


def test_a_report_is_read_as_it_was_written() -> None:
    assert msgspec.json.decode(msgspec.json.encode(REPORT), type=FleetReport) == REPORT


def test_a_report_of_a_newer_version_is_read_without_what_is_not_known() -> None:
    body = msgspec.to_builtins(REPORT)
    body["workers"][0]["mood"] = "good"
    body["planets"] = 8
    assert msgspec.json.decode(msgspec.json.encode(body), type=FleetReport) == REPORT


def test_a_report_that_is_cut_off_is_an_error() -> None:
    body = msgspec.json.encode(REPORT)
    for end in range(len(body)):
        with pytest.raises(msgspec.DecodeError):
            msgspec.json.decode(body[:end], type=FleetReport)


@pytest.mark.parametrize(
    "body", [b'{"timeout_s": -1}', b'{"timeout_s": 86401}', b'{"timeout": 1}', b"[]", b""]
)
def test_a_drain_order_that_says_something_else_is_refused(body) -> None:
    with pytest.raises(msgspec.DecodeError):
        msgspec.json.decode(body, type=DrainOrder)


@given(st.none() | st.floats(0, 86_400))
def test_a_drain_order_may_leave_the_time_to_the_configuration(timeout_s) -> None:
    body = {} if timeout_s is None else {"timeout_s": timeout_s}
    assert msgspec.json.decode(msgspec.json.encode(body), type=DrainOrder).timeout_s == timeout_s
