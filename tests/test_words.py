"""Names that were given up do not come back: docs/glossary.md has one word per thing."""

import io
import re
import tokenize
from collections.abc import Container, Iterator
from pathlib import Path

from penstock.config.load import RETIRED as RETIRED_SETTINGS

ROOT = Path(__file__).parents[1]
FOLDERS = ("penstock", "examples", "tests", "bench", "training", "scripts")
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
    "lane": "model_queue",
    "_lane": "_model_queue",
    "lanes": "model_queues",
    "_lanes": "_model_queues",
    "rooms": "workers",
    "_rooms": "_workers",
    "told": "reported",
    "_told": "_reported",
    "is_told": "is_reported",
    "told_ns": "retry_after_ns",
    "untold": "unreported",
    "take_untold": "take_unreported",
    "news": "update",
    "_news": "_changed",
    "has_news": "has_changes",
    "on_news": "on_change",
    "heard": "received",
    "heard_ns": "received_ns",
    "most": "limit",
    "_most": "_limit",
}
"""What is used in place of each."""


ELSEWHERE = {
    "coverage.py": "a package's name",
    "managers/io_struct.py": "SGLang's",
    "tokenizer_manager.py": "SGLang's",
    "serve/openai_protocol.py": "TensorRT-LLM's",
    "vllm/distributed/kv_events.py": "vLLM's",
    "models/families/NAME.py": "a new one's",
}
"""Modules that pages and comments name, and that are not in this repository."""
MODULE = re.compile(r"[\w/-]*\w\.py\b")


def retired(source: str) -> list[tuple[int, str]]:
    """Line and name of every retired identifier."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [
        (token.start[0], token.string)
        for token in tokens
        if token.type == tokenize.NAME and token.string in RETIRED
    ]


def modules() -> list[Path]:
    """All of ours: peers' servers are installed below bench/out."""
    found = [path for each in FOLDERS for path in (ROOT / each).rglob("*.py")]
    return sorted(path for path in found if (ROOT / "bench" / "out") not in path.parents)


def test_retired_names_stay_away() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name} is called {RETIRED[name]}"
        for path in modules()
        for line, name in retired(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_only_identifiers_count() -> None:
    name = next(iter(RETIRED))
    assert retired(f"x = '{name}'  # {name}\n{name} = {name}_more\n") == [(2, name)]


def test_no_name_is_retired_and_recommended() -> None:
    assert not RETIRED.keys() & RETIRED.values()


def unknown_modules(text: str, known: Container[str]) -> list[str]:
    """What the text names as a module and is none: a path, or the end of one."""
    return [name for name in MODULE.findall(text) if name not in known and name not in ELSEWHERE]


def test_modules_that_code_messages_and_pages_name_exist() -> None:
    paths = [path.relative_to(ROOT).as_posix() for path in modules()]
    known = {path[start:] for path in paths for start in starts(path)}
    readers = [*(ROOT / "penstock").rglob("*.py"), *(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(readers)
        for name in unknown_modules(path.read_text(), known)
    ]
    assert not found, "\n".join(found)


def starts(path: str) -> list[int]:
    """Where the path, its last two names, ... and its file's name begin."""
    return [0, *(i + 1 for i, letter in enumerate(path) if letter == "/")]


def test_a_module_is_known_by_the_end_of_its_path() -> None:
    known = {"penstock/kv/index.py"[start:] for start in starts("penstock/kv/index.py")}
    assert unknown_modules("see index.py, kv/index.py and `penstock/kv/index.py`", known) == []
    assert unknown_modules("see cache/index.py and gone.py.", known) == ["cache/index.py", "gone.py"]


def test_messages_about_retired_settings_name_whole_paths() -> None:
    for key, sentence in RETIRED_SETTINGS.items():
        for name in re.findall(r"[\w/]+\.py", sentence):
            assert (ROOT / name).is_file(), f"{key}: {name}"


def test_pages_name_no_setting_that_is_gone() -> None:
    gone = {
        prefix + key.removeprefix("models[].") for key in RETIRED_SETTINGS for prefix in ("", "models[].")
    }
    found = [
        f"{page.relative_to(ROOT)}: {key}"
        for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]
        for key in re.findall(r"`([a-z_]+[\w.\[\]]*\.[a-z_]+)`", page.read_text())
        if key in gone
    ]
    assert not found, "\n".join(found)


NOUNLESS = re.compile(
    r"(?:\A|(?<=[.?!]\s)|(?<=[:;]\s))(?:What|Who|Whom|Whose|Whoever|Whomever|Whatever)\b[^.?!]*(?:[.?!]|\Z)"
)
HEADING = re.compile(r"\s*(?:#|\*\*|\| *What)")
"""Headings may be such clauses ("What it costs"), also those in bold and those of tables."""


def nounless(text: str) -> list[str]:
    """Sentences that begin with What or Who in place of a noun, which is no English for a description:
    "What a request used" is "Usage of a request". Questions may.
    """
    found = [match[0] for match in NOUNLESS.finditer(" ".join(text.split()))]
    return [sentence for sentence in found if not sentence.endswith("?")]


def prose(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of every string and of every run of whole-line comments; comments behind code too."""
    run: list[str] = []
    begin = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            alone = not token.line[: token.start[1]].strip()
            if not (run and alone and token.start[0] == last + 1):
                if run:
                    yield begin, " ".join(run)
                run, begin = [], token.start[0]
            run.append(token.string.lstrip("#: "))
            last = token.start[0] if alone else 0
        elif token.type == tokenize.STRING:
            yield (
                token.start[0],
                re.sub(r"""\A[a-zA-Z]*(['"]{3}|['"])\\?|(['"]{3}|['"])\Z""", "", token.string),
            )
    if run:
        yield begin, " ".join(run)


def test_sentences_name_their_subject() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {sentence}"
        for path in sorted((ROOT / "penstock").rglob("*.py"))
        for line, text in prose(path.read_text())
        for sentence in nounless(text)
    ]
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"]:
        for paragraph in re.split(r"\n\s*\n|\n(?=[-*|#] ?)", page.read_text()):
            if not HEADING.match(paragraph):
                found += [f"{page.relative_to(ROOT)}: {each}" for each in nounless(paragraph.lstrip("-*| "))]
    assert not found, "\n".join(found)


def test_questions_may_begin_so() -> None:
    source = (
        'def used():\n    """Answers. What a request used.\n\n    Why? Who asks?"""\n'
        "    # It counts. Who\n    # asks pays.\n"
    )
    assert [sentence for _, text in prose(source) for sentence in nounless(text)] == [
        "What a request used.",
        "Who asks pays.",
    ]
    assert nounless("It says what it used, and who asked.") == []
