"""The counting script, on a small tree and on made-up recordings of two processes."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(scope="module")
def house() -> ModuleType:
    spec = importlib.util.spec_from_file_location("house", SCRIPTS / "house.py")
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["house"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_sources_are_counted(house: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "penstock/engine").mkdir(parents=True)
    (tmp_path / "bench").mkdir()
    (tmp_path / "penstock/one.py").write_text("class Same:\n    class Inner: ...\n\nclass _Own: ...\n")
    body = "    x = 1\n"
    (tmp_path / "penstock/two.py").write_text(f"class Same: ...\ndef long():\n{body * 70}")
    (tmp_path / "penstock/engine/kernel.cpp").write_text("int x;\nint y;\n")
    (tmp_path / "bench/wide.py").write_text(f"x = '{'y' * 106}'\nx = '{'y' * 104}'\n")
    assert house.count_sources(tmp_path) == {
        "modules": 2,
        "duplicate_class_names": 1,
        "package_lines": 4 + 72 + 2,
        "bench_lines": 2,
        "functions_over_70_lines": 1,
        "lines_over_110_columns": 1,
        "names_used_more_than_once": ["Same"],
    }


def test_only_what_a_request_runs_is_on_its_way(house: ModuleType) -> None:
    def ran(*functions: tuple[str, str]) -> dict[str, object]:
        return {"functions": [[file, name, 1] for file, name in functions]}

    idle = {"gateway": ran(("clock.py", "now"), ("app.py", "beat")), "worker": ran()}
    request = {
        "gateway": ran(("clock.py", "now"), ("app.py", "beat"), ("app.py", "handle"), ("hash.py", "of")),
        "worker": ran(("hash.py", "of"), ("core.py", "step")),
    }
    beaten = {
        **request,
        "gateway": ran(("clock.py", "now"), ("hash.py", "of"), ("app.py", "handle"), ("alerts.py", "look")),
    }
    ways = house._ways(idle, [request, beaten])
    assert ways["files"] == {"gateway": ["app.py", "hash.py"], "worker": ["core.py", "hash.py"]}
    assert ways["files_on_a_requests_way"] == 3


def test_objects_per_request_are_those_that_every_stream_has(house: ModuleType) -> None:
    streams = house.NUM_STREAMS
    idle = {"gateway": {"objects": {"App": 1, "Old": 7}}, "worker": {"objects": {}}}
    held = {
        "gateway": {"objects": {"App": 1, "Old": 6 + streams, "Reply": streams}},
        "worker": {"objects": {"Row": 2 * streams}},
    }
    found = house._objects(idle, held)
    assert found["classes_per_request"] == {"gateway": ["Reply"], "worker": ["Row"]}
    assert (found["objects_per_request"], found["objects_per_request_in_worker"]) == (1, 1)


def test_two_results_make_the_table_of_the_design_page(house: ModuleType) -> None:
    results = SCRIPTS.parent / "docs/results"
    files = [file for when in ("before", "after") for file in results.glob(f"*-house-{when}.json")]
    table = house.format_table(*(house.json.loads(file.read_text()) for file in files))
    assert table in (SCRIPTS.parent / "docs/design/015-the-house-in-figures.md").read_text()
