"""Names that were given up do not come back: docs/glossary.md has one word per thing."""

import io
import tokenize
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("penstock", "tests", "bench", "training", "scripts")
RETIRED = {
    "Witness": "RunRecorder",
    "KVNews": "KVUpdate",
    "Siblings": "GatewayPeers",
    "siblings": "peers",
    "OnBoard": "InFlightAtCrash",
    "on_board": "in_flight_at_crash",
    "Poison": "CrashPolicy",
    "Parts": "Policies",
    "place_beside": "place_hedge",
    "_tell_of_money": "_report_spending",
    "let_streams_go_on": "resume_reading",
    "hold_streams": "pause_reading",
    "go_on": "resume_reading",
    "NOBODY": "ANONYMOUS",
    "ANYBODY": "ANONYMOUS_CALLER",
    "Rooms": "CapacityTable",
    "Thrift": "BudgetDowngrade",
    "_coast_max": "_fast_forward_max",
    "_coast_rows": "_fast_forward_rows",
    "_leap": "_fast_forward",
    "_surroundings": "_context",
    "_WorkerWords": "_WorkerLogBuffer",
    "ApiTrouble": "ApiError",
    "ChildNews": "ChildReport",
    "ComebackTimes": "RetryAfterSchedule",
    "events_of_own": "events_of_engine",
    "FittedLaw": "FittedModel",
    "foreign_concurrency": "external_concurrency",
    "ForeignConformance": "ExternalConformance",
    "ForeignNames": "ExternalBlockNames",
    "ForeignWorker": "ExternalWorker",
    "goes_on_at": "can_resume_at",
    "is_convicted": "is_blocked",
    "kv_words": "kv_event_channel",
    "KVEventFeed": "KVEventPublisher",
    "KVFeed": "KVEventSubscriber",
    "KVPublisher": "ZmqPublisher",
    "KVWords": "KVEventChannel",
    "Lane": "ModelQueue",
    "Leap": "DecodeFastForward",
    "leap_max": "fast_forward_max",
    "ModelWord": "ModelReadiness",
    "num_convicted": "num_blocked",
    "num_foreign": "num_external",
    "num_untold": "num_unreported",
    "OnlineLaw": "OnlineLinearModel",
    "OwnBackend": "EngineBackend",
    "OwnNames": "EngineBlockNames",
    "OwnStream": "EngineStream",
    "OwnWorker": "EngineWorker",
    "PoisonRequest": "CrashingRequest",
    "read_law": "read_model",
    "says_trouble": "reports_connect_errors",
    "shown_logprob": "to_text_logprob",
    "Surroundings": "ServerContext",
    "ToldCost": "ReportedCost",
    "UNTOLD_MAX": "UNREPORTED_MAX",
    "wait_told": "wait_reported",
}
"""What is used in place of each."""


def retired(source: str) -> list[tuple[int, str]]:
    """Line and name of every retired identifier."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (token.start[0], token.string)
        for token in tokens
        if token.type == tokenize.NAME and token.string in RETIRED
    ]


def test_retired_names_stay_away() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} is called {RETIRED[name]}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, name in retired(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_only_identifiers_count() -> None:
    name = next(iter(RETIRED))
    assert retired(f"x = '{name}'  # {name}\n{name} = {name}_more\n") == [(2, name)]


def test_no_name_is_retired_and_recommended() -> None:
    assert not RETIRED.keys() & RETIRED.values()
