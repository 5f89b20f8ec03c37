"""Old keys are refused with a sentence that says what became of them."""

import re
from pathlib import Path

import pytest
from msgspec import inspect

from penstock.config.load import RETIRED, parse_config, retired
from penstock.config.tree import Config
from penstock.errors import ConfigError

ROOT = Path(__file__).parents[2]
KNOWN = {
    "server.backlog": "fixed at 2048",
    "models[].engine.wide": "moved to `models[].engine.step_tokens`",
    "old.*": "the feature was removed",
    "old.name": "moved to `log.level`",
    "server.deep.*": "every bound there is fixed",
}


@pytest.mark.parametrize(
    ("path", "value", "lines"),
    [
        ("server.backlog", 5, ["`server.backlog` is no longer a setting: fixed at 2048"]),
        ("models[3].engine.wide", 1,
         ["`models[3].engine.wide` is no longer a setting: moved to `models[].engine.step_tokens`"]),
        ("old", {"name": 1, "other": 2},
         ["`old.name` is no longer a setting: moved to `log.level`",
          "`old.other` is no longer a setting: the feature was removed"]),
        ("old", None, ["`old` is no longer a section: the feature was removed"]),
        ("server.deep", {"any": {"x": 1}},
         ["`server.deep.any` is no longer a setting: every bound there is fixed"]),
        ("server.prot", 1, []),
        ("older", {"name": 1}, []),
    ],
)  # fmt: skip
def test_a_retired_key_has_a_sentence(path: str, value: object, lines: list[str]) -> None:
    assert list(retired(path, value, KNOWN)) == lines


def test_a_file_hears_of_all_its_retired_keys_at_once_and_of_no_nearest_key() -> None:
    text = "models: [{path: x, engine: {pin_threads: true}}, {path: y, engine: {pin_threads: false}}]"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="f.yaml")
    first, second = str(caught.value).splitlines()
    assert first.startswith("f.yaml: `models[0].engine.pin_threads` is no longer a setting: ")
    assert second.startswith("`models[1].engine.pin_threads` is no longer a setting: ")
    assert "did you mean" not in str(caught.value)


def test_no_key_is_both_a_setting_and_retired() -> None:
    settings = set(_paths(inspect.type_info(Config), ""))
    assert "models[].engine.step_tokens" in settings
    for path in RETIRED:
        assert path not in settings
        if path.endswith(".*"):
            assert path.removesuffix(".*") not in settings, (
                "a wildcard is for a section that is gone as a whole"
            )
            continue
        section = path.rpartition(".")[0]
        assert not section or section in settings or f"{section}.*" in RETIRED or section in RETIRED, path


def test_a_sentence_that_names_a_setting_names_one_that_exists() -> None:
    settings = set(_paths(inspect.type_info(Config), ""))
    for path, sentence in RETIRED.items():
        assert sentence, path
        assert not sentence.endswith("."), path
        for name in sentence.split("`")[1::2]:
            assert name in settings or name.startswith(("-", "penstock ", "PENSTOCK_")), (path, name)


def test_a_file_that_a_sentence_names_exists() -> None:
    named = {
        name
        for sentence in RETIRED.values()
        for name in re.findall(r"(?:penstock|docs)/[-\w/]+\.\w+", sentence)
    }
    assert len(named) > 10
    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []


def _paths(kind: inspect.Type, path: str) -> list[str]:
    if isinstance(kind, inspect.Metadata):
        return _paths(kind.type, path)
    if isinstance(kind, inspect.UnionType):
        return [found for part in kind.types for found in _paths(part, path)]
    if isinstance(kind, inspect.VarTupleType):
        return [f"{path}[]", *_paths(kind.item_type, f"{path}[]")]
    if not isinstance(kind, inspect.StructType):
        return []
    found: list[str] = []
    for field in kind.fields:
        name = f"{path}.{field.encode_name}" if path else field.encode_name
        found += [name, *_paths(field.type, name)]
    return found
