"""How many drafts a row gets: as many as pay by the fitted law, and never more than fit."""

from array import array
from random import Random

import pytest
from scheduled_engine import ScheduledEngine

from penstock.config.engine_settings import EngineSettings
from penstock.schedule.draft_times import DraftTimes
from penstock.schedule.prefill_budget import LatencyTargets, PrefillBudget
from penstock.schedule.request import Request
from penstock.schedule.shares import OutputEstimate
from penstock.schedule.speculation import (
    CAUTIOUS,
    KNOWN_STEPS,
    MATCHES_EXPECTED,
    MISSED_STEPS,
    PROBE_STEPS,
    REST_STEPS,
    ROW_DRAFTS_MAX,
    STEP_DRAFTS_MAX,
    VAIN_LOOKS,
    Speculation,
    learn,
)
from penstock.schedule.step import share_times
from penstock.schedule.step_time import StepLoad, StepTimeModel
from penstock.types import RequestId, SamplingParams


def row(hits: int, misses: int, *, left: int = 100) -> Request:
    """A request that decodes, of whose drafts so many were right."""
    made = Request(request_id=RequestId("r"), tokens=[1] * 50, sampling=SamplingParams(max_tokens=left))
    made.first_token_ns, made.num_planned = 1, 49
    made.num_tokens_max = 50 + left
    for _ in range(misses):
        learn(made, 1, 0)
    for _ in range(hits):
        learn(made, 4, 4)
    return made


def law(fixed_ns: int, token_ns: int) -> StepTimeModel:
    """A machine whose steps take so long, and so much more for each token."""
    model = StepTimeModel()
    for num_rows in (1, 2, 4, 8, 16, 32) * 4:
        load = StepLoad(num_rows, num_rows, 50 * num_rows)
        model.observe(load, fixed_ns + token_ns * num_rows)
    return model


def chosen(model: StepTimeModel, rows: list[Request], room: int = 500) -> dict[int, int]:
    load = StepLoad(len(rows), len(rows), 50 * len(rows))
    laws = PrefillBudget(LatencyTargets())
    laws.model = model
    return dict(Speculation(laws, EngineSettings().draft_worth, OutputEstimate()).choose(rows, load, room))


def test_a_lone_row_has_more_drafts_the_more_often_they_are_right() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    counts = [chosen(model, [row(hits, 10)]).get(0, 0) for hits in (0, 2, 6, 30)]
    assert counts == sorted(counts)
    assert counts[0] <= 2 < counts[-1] == ROW_DRAFTS_MAX


def test_drafts_end_where_tokens_cost_as_much_as_the_step_gives_for_them() -> None:
    """In a full batch a draft takes the time of a row's token: only rows that are nearly always right pay."""
    model = law(fixed_ns=1_000_000, token_ns=1_000_000)
    assert chosen(model, [row(3, 3) for _ in range(32)]) == {}
    assert chosen(model, [row(30, 0) for _ in range(32)]) == {}
    bandwidth = law(fixed_ns=50_000_000, token_ns=100_000)
    few = chosen(bandwidth, [row(30, 0) for _ in range(32)])
    assert sum(few.values()) == STEP_DRAFTS_MAX


def test_the_rows_that_are_right_most_often_come_first() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    found = chosen(model, [row(0, 9), row(30, 0), row(3, 3)], room=20)
    assert found[1] == ROW_DRAFTS_MAX
    assert found.get(0, 0) <= found.get(2, 0)
    assert sum(found.values()) <= 20


def test_no_draft_goes_past_the_end_of_the_answer() -> None:
    model = law(fixed_ns=10_000_000, token_ns=300_000)
    assert chosen(model, [row(30, 0, left=1)]) == {}
    assert chosen(model, [row(30, 0, left=4)]) == {0: 3}


def test_who_has_not_begun_to_answer_has_none() -> None:
    waiting = row(30, 0)
    waiting.first_token_ns = None
    assert chosen(law(10_000_000, 300_000), [waiting]) == {}


def test_a_row_without_drafts_has_one_now_and_then() -> None:
    model = law(fixed_ns=1_000_000, token_ns=2_000_000)
    for num_rows in (2, 8):
        rows = [row(0, 20) for _ in range(num_rows)]
        found = [chosen(model, rows) for _ in range(num_rows * PROBE_STEPS)]
        assert found[:-1] == [{}] * (num_rows * PROBE_STEPS - 1)
        assert found[-1] == dict.fromkeys(range(num_rows), 1)


def guesser(pass_ns: int, token_ns: int, *, right: bool) -> Speculation:
    """Drafts of a model with such passes, for steps of 10 ms and 0.3 ms for each token; of late it was nearly
    always right, or wrong.
    """
    laws = PrefillBudget(LatencyTargets())
    laws.model = law(fixed_ns=10_000_000, token_ns=300_000)
    for tokens, passes in ((1, 1), (40, 1), (4, 4), (64, 2)) * 4:
        load = StepLoad(tokens, passes, 50 * tokens, 0, passes)
        laws.drafting.observe(load, passes * pass_ns + tokens * token_ns)
    made = Speculation(laws, EngineSettings().draft_worth, OutputEstimate())
    for _ in range(20):
        made.learn(row(0, 0), 4, 4 * right)
    return made


def counts_of(speculation: Speculation, rows: list[Request]) -> list[int]:
    if speculation.rests(len(rows)):
        return [0] * len(rows)
    load = StepLoad(len(rows), len(rows), 50 * len(rows))
    found = dict(speculation.choose(rows, load, 500))
    return [found.get(index, 0) for index in range(len(rows))]


def test_a_models_passes_have_their_price() -> None:
    """The longer they take, the fewer: one draft more is one pass more, which all rows share."""
    (cheap,), (half,), (dear,) = (
        counts_of(guesser(pass_ns, 1_000, right=True), [row(0, 0)])
        for pass_ns in (500_000, 4_000_000, 20_000_000)
    )
    assert cheap > half > dear == 0
    four = [row(0, 0) for _ in range(4)]
    for each in four:
        each.draft_known = each.num_planned
    assert sum(counts_of(guesser(4_000_000, 1_000, right=True), four)) > 2 * half


def test_what_a_model_has_not_read_of_a_request_counts() -> None:
    speculation, asked = guesser(500_000, 1_000_000, right=True), row(0, 0)
    asked.num_planned = 3_000
    assert counts_of(speculation, [asked]) == [0]
    asked.draft_known = asked.num_planned
    looks = [counts_of(speculation, [asked])[0] for _ in range(REST_STEPS)]
    assert looks[:-1] == [0] * (REST_STEPS - 1)
    assert looks[-1] > 0


def test_a_model_that_was_wrong_is_tried_again_after_a_while() -> None:
    """For a lone row; what a full batch cannot afford it does not try."""
    speculation = guesser(2_000_000, 1_000, right=False)
    tried = [counts_of(speculation, [row(0, 0)])[0] for _ in range(3000)]
    assert tried[0] == 0 < max(tried[-REST_STEPS:])
    full = guesser(2_000_000, 1_000_000, right=False)
    assert all(counts_of(full, [row(0, 0) for _ in range(32)]) == [0] * 32 for _ in range(200))


def test_before_the_law_is_known_few_rows_have_few() -> None:
    assert chosen(StepTimeModel(), [row(0, 0)]) == {0: CAUTIOUS}
    assert chosen(StepTimeModel(), [row(0, 0) for _ in range(CAUTIOUS + 1)]) == {}


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_are_those_without_drafts_in_fewer_steps(overlap: bool) -> None:
    """And wrong drafts count as rejected, and as nothing else."""
    counts: list[int] = []
    for guesses in (None, Random(1)):
        engine = ScheduledEngine(overlap=overlap, guesses=guesses)
        engine.submit("a", range(30), max_tokens=80, stop_token_ids=())
        engine.submit("b", range(7), max_tokens=80, seed=3)
        engine.run()
        for name in ("a", "b"):
            assert tuple(engine.got[name]) == engine.expected(name)
            usage = engine.ends[name].usage
            assert usage is not None
            assert usage.completion_tokens == 80
            assert usage.computed_tokens == usage.prompt_tokens + 79
            if guesses is None:
                assert (usage.accepted_drafts, usage.rejected_drafts) == (0, 0)
            else:
                assert 0 < usage.accepted_drafts < 80
                assert usage.rejected_drafts > 0
        counts.append(len(engine.plans))
    assert counts[1] < 0.8 * counts[0]


def test_a_stop_token_among_accepted_drafts_ends_the_answer_there() -> None:
    for seed in range(20):
        engine = ScheduledEngine(guesses=Random(seed))
        engine.submit("a", range(9), max_tokens=90, seed=seed, stop_token_ids=tuple(range(4)))
        engine.run()
        assert tuple(engine.got["a"]) == engine.expected("a")


def test_log_probabilities_are_told_one_by_one() -> None:
    engine = ScheduledEngine(guesses=Random(2))
    engine.submit("a", range(9), max_tokens=40, logprobs=0)
    reported = 0
    while engine.plan() is not None:
        result = engine.runner.collect()
        engine.flights.clear()
        for output in engine.scheduler.apply(result).outputs:
            assert len(output.token_ids) == 1
            reported += 1
    assert reported == 40


def test_drafts_and_their_time_are_charged_to_who_has_them() -> None:
    """A row with drafts takes a larger part of its step."""
    engine = ScheduledEngine(guesses=Random(3))
    for name in ("a", "b"):
        engine.submit(name, range(9), max_tokens=60, seed=5)
    while engine.scheduler.has_work:
        engine.plan()
        flight, result = engine.scheduler.oldest, engine.runner.collect()
        engine.scheduler.count_drafts(result)
        before = [request.device_ns for request in flight.requests]
        share_times([(flight, 1_000_000)])
        shares = [request.device_ns - was for request, was in zip(flight.requests, before, strict=True)]
        assert sum(shares) <= 1_000_000
        if len(flight.drafted) == 2 and flight.drafted[0] != flight.drafted[1]:
            more = flight.drafted.index(max(flight.drafted))
            assert shares[more] > shares[1 - more]
        engine.flights.clear()
        engine.scheduler.apply(result)


def test_nothing_is_read_for_an_answer_that_soon_ends() -> None:
    """The work of reading is repaid by the tokens that are left, as far as others' lengths tell them; a head
    on the target's states reads along and has none.
    """
    pass_ns, token_ns, said = 500_000, 1_000_000, 600
    long, short, head = (guesser(pass_ns, token_ns, right=True) for _ in range(3))
    for speculation, length in ((long, 400), (short, 8), (head, 8)):
        for _ in range(100):
            ended = row(0, 0)
            ended.num_prompt, ended.tokens = 50, array("i", [1] * (50 + length))
            speculation._estimate.learn(ended)
    head._laws.drafter_reads = False  # As `PrefillBudget` learns it.
    counts: list[int] = []
    for speculation in (long, short, head):
        asked = row(0, 0, left=1000)
        asked.num_prompt, asked.num_planned, asked.tokens = said, said, array("i", [1] * (said + 1))
        asked.num_tokens_max = said + 1000
        counts += counts_of(speculation, [asked])
    assert counts[0] > counts[1] == 0 < counts[2]


def test_reading_that_drafts_do_not_repay_ends() -> None:
    """Whatever answers are expected to be: once more was read than right drafts gained, a hundredth of the
    time is left for it.
    """
    speculation, read, steps = guesser(500_000, 100_000, right=True), 0, 1200
    for _ in range(steps):
        asked = row(0, 0)
        asked.num_planned = 300
        read += bool(counts_of(speculation, [asked])[0])  # And then it ends: no draft was right.
    spent_ns, all_ns = read * 300 * 100_000, steps * 10_300_000
    assert 0.008 * all_ns < spent_ns < 0.02 * all_ns
    gaining, read = guesser(500_000, 100_000, right=True), 0
    for _ in range(steps):
        asked = row(0, 0)
        asked.num_planned = 300
        read += bool(counts_of(gaining, [asked])[0])
        for _ in range(4):
            gaining.learn(asked, 8, 8)
    assert read > 0.9 * steps


def test_one_step_reads_no_more_than_the_account_has() -> None:
    """Each row that is read has its price, so that the next one waits until drafts have repaid it."""
    speculation, rows = guesser(100_000, 20_000, right=True), [row(0, 0) for _ in range(4)]
    for each in rows:
        each.num_planned = 300
    assert sum(map(bool, counts_of(speculation, rows))) == 1
    assert counts_of(speculation, rows) == [0] * 4
    for _ in range(8):
        speculation.learn(row(0, 0), 8, 8)
    assert sum(map(bool, counts_of(speculation, rows))) > 1


def test_the_first_passes_of_a_model_do_not_decide() -> None:
    """They take longer than any later: few rows have drafts until the law has seen some, also of a batch that
    is never small.
    """
    speculation = guesser(500_000, 1_000, right=True)
    slow = speculation._drafting = StepTimeModel()
    slow.observe(StepLoad(4, 4, 200, 0, 4), 400_000_000)
    assert counts_of(speculation, [row(0, 0)]) == [CAUTIOUS]
    few = [CAUTIOUS] * CAUTIOUS
    assert counts_of(speculation, [row(0, 0) for _ in range(32)]) == few + [0] * (32 - CAUTIOUS)
    for _ in range(KNOWN_STEPS):
        slow.observe(StepLoad(4, 4, 200, 0, 4), 400_000_000)
    assert counts_of(speculation, [row(0, 0)]) == [0]


def test_few_rows_that_run_ahead_bring_a_batch_no_nearer_to_its_end() -> None:
    """One of many saves its own token's time by a draft; a lone row saves the step's."""
    speculation = guesser(100_000, 1_000, right=True)
    assert counts_of(speculation, [row(30, 0)])[0] > 4
    others = [row(0, 40) for _ in range(31)]
    assert counts_of(speculation, [row(30, 0), *others]) == [0] * 32


def test_a_batch_in_which_no_draft_pays_is_looked_at_again_after_some_steps() -> None:
    """Or when an eighth of its rows has gone."""
    speculation, rows = guesser(20_000_000, 1_000, right=True), [row(0, 0) for _ in range(4)]
    assert not speculation.rests(4)
    assert counts_of(speculation, rows) == [0] * 4
    assert [speculation.rests(4) for _ in range(REST_STEPS)] == [True] * (REST_STEPS - 1) + [False]
    assert counts_of(speculation, rows) == [0] * 4
    assert speculation.rests(4)
    assert not speculation.rests(3)
    speculation, many = guesser(20_000_000, 1_000, right=True), [row(0, 0) for _ in range(32)]
    assert counts_of(speculation, many) == [0] * 32
    assert all(map(speculation.rests, (32, 31, 29)))
    assert not speculation.rests(28)
    assert counts_of(speculation, []) == []
    assert not speculation.rests(1)


def test_a_batch_that_rests_is_looked_at_when_a_draft_of_it_was_right_or_wrong() -> None:
    """A draft may be in flight while nothing is chosen."""
    speculation, rows = guesser(20_000_000, 1_000, right=True), [row(0, 0) for _ in range(4)]
    assert counts_of(speculation, rows) == [0] * 4
    assert speculation.rests(4)
    speculation.learn(rows[0], 2, 1)
    assert not speculation.rests(4)


def head(pass_ns: int) -> Speculation:
    """A head on the target's states, which has guessed before."""
    made = guesser(pass_ns, 1_000, right=True)
    made._laws.drafter_reads = False  # As `PrefillBudget` learns it.
    return made


def test_where_no_draft_of_a_head_pays_states_are_read_no_more() -> None:
    """And again when one does: then the drafts come one step later, when there is a state."""
    speculation, rows = head(4_000_000), [row(0, 60) for _ in range(8)]
    for look in range(VAIN_LOOKS):
        assert speculation.reads_states
        assert counts_of(speculation, rows) == [0] * 8
        looked = [counts_of(speculation, rows) for _ in range(REST_STEPS - 1)]
        assert looked == [[0] * 8] * (REST_STEPS - 1), look
    assert not speculation.reads_states
    lone = row(0, 0)
    assert counts_of(speculation, [lone]) == [0]
    assert speculation.reads_states
    assert counts_of(speculation, [lone])[0] > 0


def test_the_states_of_prompts_are_read_where_their_answers_may_have_drafts() -> None:
    for pass_ns, reads in ((500_000, True), (50_000_000, False)):
        speculation = head(pass_ns)
        speculation.reads_states = False
        assert speculation.choose([], StepLoad(90, 1, 90, 4_000), 500) == []
        assert speculation.reads_states == reads


def test_drafts_of_who_needs_no_states_come_at_once() -> None:
    speculation = guesser(500_000, 1_000, right=True)
    for _ in range(VAIN_LOOKS * REST_STEPS):
        counts_of(speculation, [row(0, 60) for _ in range(32)])
    assert not speculation.reads_states
    assert counts_of(speculation, [row(0, 0)])[0] > 0


def asked_of(rows: list[Request], first: float) -> Speculation:
    """Guesses from the text itself, on a machine where a step's first draft takes so much of its time."""
    laws = PrefillBudget(LatencyTargets())
    laws.model, laws.draft_times = law(fixed_ns=10_000_000, token_ns=300_000), DraftTimes()
    for num_drafts in (1, 2, 4, 8) * 100:
        laws.draft_times.observe_plain(len(rows), 1.0)
        took = 1 + first + 0.03 * (num_drafts - 1)
        laws.draft_times.observe(len(rows), num_drafts, took, 0.03)
    return Speculation(laws, EngineSettings().draft_worth, OutputEstimate())


def looked(speculation: Speculation, rows: list[Request]) -> dict[int, int]:
    return dict(speculation.choose(rows, StepLoad(len(rows), len(rows), 50 * len(rows)), 500))


def test_the_first_draft_of_a_step_must_pay_for_its_jump() -> None:
    """The same row: none where a step with drafts takes half as long again, some where it does not."""
    for first, pays in ((0.05, True), (0.9, False)):
        seldom = row(0, 6)
        speculation = asked_of([seldom], first)
        for _ in range(40):
            speculation.learn(row(0, 0), 4, 1)
            speculation.learn(level(1), 4, 1)
            speculation.learn(level(2), 4, 1)
        assert bool(looked(speculation, [seldom])) is pays
    often = row(30, 0)
    assert looked(asked_of([often], 0.9), [often])[0] > 8


def level(which: int) -> Request:
    made = row(0, 0)
    made.draft_level = which
    return made


def test_where_short_matches_are_wrong_longer_ones_are_waited_for() -> None:
    """And a new request begins with what others were right behind."""
    asked = row(0, 0)
    speculation = asked_of([asked], 0.35)
    assert looked(speculation, [asked])
    assert asked.draft_level == 0
    for _ in range(12):
        speculation.learn(asked, 3, 0)
    assert looked(speculation, [asked])
    assert asked.draft_level > 0
    fresh = row(0, 0)
    assert looked(speculation, [fresh])
    assert fresh.draft_level > 0


def test_a_row_for_which_nothing_was_found_is_asked_again_some_steps_later() -> None:
    for which, steps in enumerate(MISSED_STEPS):
        asked = level(which)
        speculation = asked_of([asked], 0.1)
        assert looked(speculation, [asked])
        speculation.missed(asked)
        waited = 1
        while speculation.rests(1) or not looked(speculation, [asked]):
            waited += 1
        assert waited == steps


def test_all_levels_are_tried_again_after_a_while() -> None:
    """A row that waits for long matches, of which none comes."""
    asked = row(0, 0)
    speculation = asked_of([asked], 0.35)
    for _ in range(12):
        speculation.learn(asked, 3, 0)
    levels: list[int] = []
    for _ in range(4 * PROBE_STEPS):
        if not speculation.rests(1) and looked(speculation, [asked]):
            levels.append(asked.draft_level)
            speculation.missed(asked)
    assert levels[0] > 0
    assert 0 in levels


def test_long_matches_are_tried_again_after_a_bad_spell_of_all_levels() -> None:
    """A level that others were wrong behind comes back for requests to which it never misses, while one that
    stays wrong is seldom tried.
    """
    for is_right in (True, False):
        speculation = asked_of([row(0, 0)], 0.35)
        for which in range(len(MATCHES_EXPECTED)):
            for _ in range(60):
                speculation.learn(level(which), 4, 0)
        counts = [0] * len(MATCHES_EXPECTED)
        for _ in range(40):
            asked = row(0, 0, left=1000)
            for _ in range(100):
                if speculation.rests(1) or not (found := looked(speculation, [asked])):
                    continue
                counts[asked.draft_level] += 1
                right = found[0] if is_right and asked.draft_level == 2 else 0
                speculation.learn(asked, found[0], right)
        if is_right:
            assert counts[2] > 1000
        else:
            assert 0 < sum(counts[1:]) < sum(counts) < 4000 / 25


def test_only_lookups_that_must_pay_rest_after_a_miss() -> None:
    """A model has a guess in the next step, and where all drafts are taken the next look comes at once."""
    laws = PrefillBudget(LatencyTargets())
    laws.model = law(fixed_ns=10_000_000, token_ns=300_000)
    for speculation in (guesser(500_000, 1_000, right=True), Speculation(laws, 0.0, OutputEstimate())):
        asked = row(0, 0)
        for _ in range(3):
            assert counts_of(speculation, [asked])[0] > 0
            speculation.missed(asked)
            assert not asked.draft_rest
