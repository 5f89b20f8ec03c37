"""Cells in the simulator: what goes to peers, what stays, and what is left when cells are lost."""

from collections import Counter
from dataclasses import replace

import pytest

from penstock.policy.flow import Outcome
from penstock.sim.scenarios.catalogue import SCENARIOS
from penstock.sim.scenarios.scenario import Verdict, run_scenario
from penstock.sim.scenarios.setup import Knobs, play
from penstock.sim.world.cells import Cells


def passed(name: str) -> Verdict:
    verdict = run_scenario(SCENARIOS[name], Knobs(), 1)
    assert verdict.passed, [each for each in verdict.findings if not each.passed]
    return verdict


def cells_of(verdict: Verdict) -> Cells:
    assert verdict.played.cells is not None
    return verdict.played.cells


def test_a_cell_with_too_much_to_do_is_helped_and_every_request_is_billed_by_its_own() -> None:
    verdict = passed("cell-spill")
    cells = cells_of(verdict)
    guests = {each.origin_id: each for each in cells.guest_bills if each.outcome is Outcome.FINISHED}
    origins = Counter(each.origin for each in guests.values())
    assert origins.most_common(1)[0][0] == "east", "the others only make room for its guests"
    away = {each.id: each for each in verdict.played.records if each.worker.startswith("cell:")}
    assert guests.keys() == {name for name, each in away.items() if each.outcome is Outcome.FINISHED}
    for name, bill in guests.items():
        assert bill.completion_tokens == away[name].completion_tokens, "both ledgers say the same"


@pytest.mark.parametrize("name", ["cell-lost", "region-lost"])
def test_streams_of_a_lost_cell_go_on_with_their_own_tokens(name: str) -> None:
    verdict = passed(name)
    moved = [each for each in verdict.played.records if each.migrations]
    assert moved
    assert {each.outcome for each in moved} == {Outcome.FINISHED}
    counts = Counter(each.id for each in verdict.played.records)
    assert set(counts.values()) == {1}


def test_cells_without_each_other_are_as_if_there_were_none() -> None:
    setup = replace(SCENARIOS["cell-breakers"].build(Knobs()), seconds=20)
    alone = play(replace(setup, cells=None), 1)
    assert not any(each.worker.startswith("cell:") for each in alone.records)
    again = play(setup, 1), play(setup, 1)
    assert again[0].result.digest == again[1].result.digest != alone.result.digest
