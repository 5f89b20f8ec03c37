"""Recorded traces: what is written is read again, and a broken file is named by its line."""

import gzip
from itertools import combinations
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.sim.traffic.prompts import Segment, SimRequest
from penstock.sim.traffic.traces import Trace, write_trace
from penstock.sim.traffic.workload import Callers, Conversations, Poisson, even, merged

HEADER = '{"format":"penstock-trace/1","block_size":64,"licence":"x","more":1}\n'


def shared(one: SimRequest, other: SimRequest) -> int:
    """Whole blocks that two prompts share."""
    pieces = [
        [(part.content, i) for part in request.prompt for i in range(part.tokens)] for request in (one, other)
    ]
    same = next((i for i, (a, b) in enumerate(zip(*pieces, strict=False)) if a != b), min(map(len, pieces)))
    return same // 16


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_written_trace_is_read_again_with_its_prefixes(tmp_path: Path, name: str) -> None:
    source = Conversations(arrivals=Poisson(1), callers=Callers(tenants=even(3)), system_tokens=250)
    requests = list(merged([source], 4, 40))
    assert write_trace(tmp_path / name, "ours", requests) == len(requests)
    trace = Trace(path=tmp_path / name)
    assert trace.header().requests == len(requests)
    again = list(trace.requests(0, 0, 60))
    for before, after in zip(requests, again, strict=True):
        assert (before.at_ns, before.tenant, before.session) == (after.at_ns, after.tenant, after.session)
        assert (before.prompt_tokens, before.output_tokens) == (after.prompt_tokens, after.output_tokens)
    for i, j in combinations(range(0, len(requests), 3), 2):
        assert shared(requests[i], requests[j]) == shared(again[i], again[j])


def test_runs_are_contents_and_speed_counts(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        HEADER + '{"arrival_s":0.5,"prompt_tokens":100,"output_tokens":3,"blocks":[[7,2]],"session":"a",'
        '"think_s":1}\n'
        + '{"arrival_s":2,"prompt_tokens":9000,"output_tokens":0}\n'
        + '{"arrival_s":4,"prompt_tokens":100,"output_tokens":1,"tenant":"x","blocks":[[7,1],[20,1]]}\n'
    )
    first, second, third = Trace(path=path, speed=2).requests(0, 1000, 10)
    assert (first.at_ns, first.prompt, first.session) == (250_000_000, (Segment(1008, 100),), "a")
    assert (second.output_tokens, second.tenant, third.tenant) == (1, "t0", "x")
    assert shared(first, third) == 4
    assert len(list(Trace(path=path, prompt_max=4096).requests(0, 0, 10))) == 2
    assert len(list(Trace(path=path).requests(0, 0, 3))) == 2
    assert len(list(Trace(path=path, limit=1).requests(0, 0, 30))) == 1


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "line 1"),
        (b'{"format":"mooncake"}\n', "expected 'penstock-trace/1'"),
        (b'{"format":"penstock-trace/1","block_size":-1}\n', "block_size"),
        (HEADER.encode() + b'{"arrival_s":1,"prompt_tokens":"9","output_tokens":1}\n', "line 2"),
        (
            HEADER.encode()
            + b'{"arrival_s":1,"prompt_tokens":9,"output_tokens":1}\n{"arrival_s":0,"prompt_tokens":9,'
            b'"output_tokens":1}\n',
            "line 3",
        ),
        (gzip.compress(HEADER.encode(), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_a_broken_trace_is_named(tmp_path: Path, content: bytes, why: str) -> None:
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=why):
        list(Trace(path=path).requests(0, 0, 100))


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        Trace(path=tmp_path / "none").header()
