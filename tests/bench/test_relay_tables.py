"""The relay bench's tables: medians, ratios round by round, verdicts, features with their own pair."""

from bench.relay import tables as relay_tables

Results = relay_tables.Results


def rounds(*cpu: float, events: float = 0.0, **more: float) -> list[dict[str, float]]:
    return [{"cpu_s_per_1000": value, "events_per_request": events, "rss_mb": 50.0, **more} for value in cpu]


def test_a_row_has_medians_with_their_spread_and_the_events_of_streams() -> None:
    results: Results = {
        "upstream": {"alone": rounds(0.0, total_p50_us=20.0)},
        "smg": {
            "whole": rounds(0.2, 0.1, 0.4),
            "paced": rounds(5.0, events=257.0),
            "alone": rounds(0.1, total_p50_us=120.0),
        },
    }
    (_, _, row) = relay_tables.peer_table(results)
    assert row == "| smg | 0.20 (0.10 to 0.40) |  |  |  |  | 5.00 | 257 | 50 MB | 100 us |  |"


def test_goals_are_held_against_medians_and_against_peers_round_by_round() -> None:
    results: Results = {
        "penstock": {
            "whole": rounds(0.1, 0.3, 0.2),
            "alone": rounds(0.0, total_p50_us=900.0, direct_p50_us=700.0),
        },
        "smg": {"whole": rounds(0.2, 0.3, 0.1)},
        "litellm": {"whole": rounds(20.0)},
    }
    table = relay_tables.goal_table(results)
    assert "| `whole`, CPU-s per 1,000 | at most 0.12 | 0.20 (0.10 to 0.30) | **missed** |" in table
    assert "| latency added at concurrency 1, p50 | at most 250 us | 200 us | met |" in table
    # The slow machine of one round is slow for both: 0.5, 1 and 2.
    assert "| `whole`, times smg's in the same run | at most 1.00 | 1.00 (0.50 to 2.00) | met |" in table
    # One round of theirs beside three of ours: each of ours to theirs.
    assert "0.010 (0.005 to 0.015) | met |" in table[-1]
    assert not any("chunks" in line for line in table), "what was not measured has no verdict"


def test_a_feature_costs_what_its_own_pair_differs_by() -> None:
    results: Results = {name: {"whole": rounds(1.0, 2.0)} for name in relay_tables.FEATURE_VARIANTS}
    results["penstock-ledger"] = {"whole": rounds(0.75, 1.5)}
    results["penstock-auth+limits+budget"] = {"whole": rounds(0.9, 1.9)}
    table = {line.split("|")[1].strip(): line for line in relay_tables.feature_table(results)}
    assert "0.375 (0.312 to 0.438) | 25%" in table["ledger"]
    assert "0.100 (0.100 to 0.100) | 7%" in table["auth (a hashed key)"]
    assert "0.000 (0.000 to 0.000)" in table["access log"]
