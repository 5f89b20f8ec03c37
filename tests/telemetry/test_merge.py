from penstock.telemetry.metrics import Metrics
from penstock.telemetry.pages import lasting, merged
from penstock.types import ModelName

SHARED = {b"s_total", b"s"}
ONE = b"""# HELP a_total A.
# TYPE a_total counter
a_total{x="1"} 2.0
a_total{x="2 3"} 1.0
# HELP g G.
# TYPE g gauge
g 4.0
# HELP s S.
# TYPE s gauge
s 7.0
# HELP s_total S.
# TYPE s_total counter
s_total 5.0
# HELP h H.
# TYPE h histogram
h_bucket{le="1.0"} 1.0
h_bucket{le="+Inf"} 2.0
h_count 2.0
h_sum 1.5
"""
OTHER = (
    ONE.replace(b"a_total{x", b'a_total{y="",x')
    .replace(b"s_total 5.0", b"s_total 9.0")
    .replace(b"s 7.0", b"s 0.0")
)


def test_what_each_has_is_added_and_what_all_share_is_taken_once():
    lines = merged([ONE, OTHER, b""], SHARED).splitlines()
    assert b'a_total{x="1"} 2.0' in lines
    assert b'a_total{y="",x="1"} 2.0' in lines
    assert {b"g 8.0", b"s 7.0", b"s_total 9.0", b'h_bucket{le="+Inf"} 4.0', b"h_sum 3.0"} <= set(lines)
    assert lines.count(b"# TYPE a_total counter") == 1
    assert lines.index(b'a_total{y="",x="1"} 2.0') < lines.index(b"# HELP g G.")


def test_an_ended_process_leaves_its_counters():
    left = lasting(ONE, SHARED)
    assert merged([ONE, left], SHARED).count(b'a_total{x="1"} 4.0') == 1
    assert b"\ng 4.0" in merged([ONE, left], SHARED)
    assert b"s_total" not in left


def test_our_own_text_survives_as_it_is():
    metrics = Metrics([ModelName("m")], version="1")
    metrics.http_response(200)
    text = metrics.render()
    assert merged([text]) == text
    twice = merged([text, text])
    assert b'penstock_http_responses_total{code="200"} 2.0' in twice
    assert b'penstock_build_info{version="1"} 1.0' in twice
