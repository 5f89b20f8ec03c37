"""The relay bench's tables: medians, and ratios round by round."""

from bench.relay.peers import Results, peer_table, ratio_table


def rounds(*cpu: float, events: float = 0.0, **more: float) -> list[dict[str, float]]:
    return [{"cpu_s_per_1000": value, "events_per_request": events, "rss_mb": 50.0, **more} for value in cpu]


def cells(table: str, name: str) -> list[str]:
    (line,) = [line for line in table.splitlines() if line.startswith(f"| {name} ")]
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_a_row_has_medians_with_their_spread_and_the_events_of_streams() -> None:
    results: Results = {
        "upstream": {"alone": rounds(0.0, total_p50_us=20.0)},
        "smg": {
            "whole": rounds(0.2, 0.1, 0.4),
            "paced": rounds(5.0, events=257.0),
            "alone": rounds(0.1, total_p50_us=120.0),
        },
    }
    row = ["0.2 (0.1 to 0.4)", "", "", "", "", "5", "257", "50", "100", ""]
    assert cells(peer_table(results), "smg") == row


def test_ours_is_held_against_peers_round_by_round() -> None:
    results: Results = {
        "penstock": {
            "whole": rounds(0.1, 0.3, 0.2),
            "alone": rounds(0.0, total_p50_us=900.0, direct_p50_us=700.0),
        },
        "smg": {"whole": rounds(0.2, 0.3, 0.1)},
        "litellm": {"whole": rounds(20.0)},
    }
    # The slow machine of one round is slow for both: 0.5, 1 and 2.
    assert cells(ratio_table(results), "penstock / smg") == ["1 (0.5 to 2)", "", ""]
    # One round of theirs beside three of ours: each of ours to theirs.
    assert cells(ratio_table(results), "penstock / litellm") == ["0.01 (0.005 to 0.015)", "", ""]
    assert cells(peer_table(results), "penstock")[-2] == "200"
