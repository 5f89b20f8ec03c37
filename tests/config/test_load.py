from contextlib import suppress
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.load import (
    convert_config,
    dump_config,
    load_config,
    parse_config,
    read_notes,
    with_environment,
)
from penstock.config.tree import AuthConfig, Config, EngineConfig, ModelConfig, ServerConfig
from penstock.errors import ConfigError


def problem(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, source="f.yaml")
    return str(caught.value)


def test_nothing_is_all_defaults() -> None:
    for text in ("", "# only a comment\n", "{}", "server:\nauth:\n  # nothing yet\n"):
        assert parse_config(text) == Config()


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "penstock.yaml"
    path.write_text(
        """
models:
  - path: penstock-demo
    engine: {max_running: 8, dtype: float32}
  - {path: Qwen/Qwen3-0.6B, name: qwen}
server: {port: 9000, drain_timeout_s: 5}
auth:
  keys: [abc, def]
"""
    )
    config = load_config(path)
    assert config.models == (
        ModelConfig(path="penstock-demo", engine=EngineConfig(max_running=8, dtype="float32")),
        ModelConfig(path="Qwen/Qwen3-0.6B", name="qwen"),
    )
    assert config.server == ServerConfig(port=9000, drain_timeout_s=5.0)
    assert config.auth.keys == ("abc", "def")


def test_an_entry_of_a_list_is_not_taken_for_another_sections() -> None:
    found = problem("prices: {models: [{name: m}]}")
    assert found.startswith("f.yaml: unknown key `prices.models[0].name`; known here: input,"), found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sever:\n  port: 1", "unknown key `sever.port`; did you mean `server.port`?"),
        ("sever: 1", "unknown key `sever`; did you mean `server`?"),
        ("sever: {prt: 1}", "unknown key `sever`; did you mean `server`?"),
        ("server: {prot: 1}", "unknown key `server.prot`; did you mean `server.port`?"),
        ("port: 1", "unknown key `port`; did you mean `server.port`?"),
        ("server: {max_runing: 1}",
         "unknown key `server.max_runing`; did you mean `models[].engine.max_running`?"),
        ("models: [{path: x}, {path: y, engin: {threads: 1}}]",
         "unknown key `models[1].engin.threads`; did you mean `models[1].engine.threads`?"),
        ("models: [{path: x, engine: {step_token: 1}}]",
         "unknown key `models[0].engine.step_token`; did you mean `models[0].engine.step_tokens`?"),
        ("log: {zzz: 1}", "unknown key `log.zzz`; known here: level, format, access"),
        ("log: {7: 1}", "unknown key `log.7`; known here: level, format, access"),
    ],
)  # fmt: skip
def test_unknown_keys_name_the_nearest_known_one(text: str, message: str) -> None:
    assert problem(text) == f"f.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server: {port: http}", "server.port: expected an integer, got 'http'"),
        ("server: {port: '8000'}", "server.port: expected an integer, got '8000'"),
        ("server: {port: 70000}", "server.port: expected an integer <= 65535, got 70000"),
        ("server: {port: 80.5}", "server.port: expected an integer, got 80.5"),
        ("server: {port: }", "server.port: expected an integer, got null"),
        ("server: [1]", "server: expected a mapping, got a list"),
        ("log: {level: loud}", "log.level: expected one of debug, error, info, warning, got 'loud'"),
        ("log: {access: 1}", "log.access: expected true or false, got 1"),
        ("server: {flush_ms: -1}", "server.flush_ms: expected a number >= 0.0, got -1"),
        ("models: penstock-demo", "models: expected a list, got 'penstock-demo'"),
        ("models: [penstock-demo]", "models[0]: expected a mapping, got 'penstock-demo'"),
        ("models: [{name: x}]", "models[0].path: missing"),
        ("models: [{path: x, engine: {kv_quota_fraction: 2}}]",
         "models[0].engine.kv_quota_fraction: expected a number <= 1.0, got 2"),
        ("models: [{path: x, engine: {max_running: 0}}]",
         "models[0].engine.max_running: expected an integer >= 1, got 0"),
        ("just text", "config: expected a mapping, got 'just text'"),
        ("[1, 2]", "config: expected a mapping, got a list"),
        ("server: {flush_ms: .nan}", "server.flush_ms: .nan is not a usable number"),
        ("server: {flush_ms: .inf}", "server.flush_ms: .inf is not a usable number"),
        ("server: {flush_ms: 1.0e+300}", "server.flush_ms: 1.0e+300 is not a usable number"),
        ("limits: {n_max: 99999999999999999999}", ("limits.n_max: 99999999999999999999 is not a usable "
        "number")),
    ],
)  # fmt: skip
def test_wrong_values_name_the_key_and_what_was_expected(text: str, message: str) -> None:
    assert problem(text) == f"f.yaml: {message}"


def test_keys_do_not_come_out_in_messages() -> None:
    assert problem("auth: {keys: hunter2}") == "f.yaml: auth.keys: expected a list"
    assert problem("auth: {keys: [1234]}") == "f.yaml: auth.keys[0]: expected a string"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("server:\n  port: 1\n  port: 2\n", "f.yaml:3:3: the key `port` is there twice"),
        ("server: {port: 1}\nserver: {}\n", "f.yaml:2:1: the key `server` is there twice"),
        ("server:\n  port: [1\n", "f.yaml:3:1: expected ',' or ']'"),
        ("server:\n\tport: 1\n", "f.yaml:2:1: found character '\\t'"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1:4: could not determine a constructor"),
        ("? [1, 2]\n: 3\n", "f.yaml:1:3: found unhashable key"),
        ("a: *nowhere", "f.yaml:1:4: found undefined alias"),
        ("a: 2020-99-99", "f.yaml: not YAML: month must be in 1..12"),
        ("--- 1\n--- 2\n", "f.yaml:2:1: but found another document"),
        ("a: \x00", "f.yaml: not YAML: unacceptable character #x0000"),
        ("[" * 1_500, "f.yaml: not YAML: "),
    ],
)
def test_broken_yaml_shows_where(text: str, message: str) -> None:
    assert problem(text).startswith(message)


def test_bytes_that_are_no_text() -> None:
    with pytest.raises(ConfigError, match="not YAML"):
        parse_config(b"\xff\xff\xff\xff")


def test_anchors_and_merges_work() -> None:
    config = parse_config(
        "models:\n- {path: a, engine: &e {max_running: 4}}\n- {path: b, engine: {<<: *e, threads: 3}}\n"
    )
    assert config.models[1].engine == EngineConfig(max_running=4, threads=3)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path)
    (tmp_path / "big.yaml").write_bytes(b"#" * (1024 * 1024 + 1))
    with pytest.raises(ConfigError, match="over the bound"):
        load_config(tmp_path / "big.yaml")


@settings(deadline=None)  # A busy machine is no wrong answer.
@given(st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), lambda inner: (
    st.lists(inner, max_size=3)
    | st.dictionaries(st.sampled_from(["server", "models", "port", "path", "engine", "log", "level"]), inner)
)))  # fmt: skip
def test_whatever_comes_the_answer_is_a_config_or_a_config_error(raw: object) -> None:
    with suppress(ConfigError):
        assert isinstance(convert_config(raw), Config)


# --- the environment -----------------------------------------------------------------------------


def test_the_environment_wins_over_the_file() -> None:
    config = Config(auth=AuthConfig(keys=("old",)))
    changed = with_environment(
        config,
        {
            "PENSTOCK_HOST": "::1",
            "PENSTOCK_PORT": "0",
            "PENSTOCK_API_KEY": f" {long('a')}, {long('b')} ,,{long('c')}",
            "PENSTOCK_ADMIN_KEY": long("d"),
            "PENSTOCK_SCRAPE_KEY": long("e"),
        },
    )
    assert (changed.server.host, changed.server.port) == ("::1", 0)
    assert changed.auth.keys == (long("a"), long("b"), long("c"))
    assert (changed.auth.admin_keys, changed.auth.scrape_keys) == ((long("d"),), (long("e"),))


def long(letter: str) -> str:
    """A key of the least length."""
    return letter * 16


@pytest.mark.parametrize("name", ["PENSTOCK_API_KEY", "PENSTOCK_ADMIN_KEY", "PENSTOCK_SCRAPE_KEY"])
def test_a_short_key_of_the_environment_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}: a key of 12 characters is too short"):
        with_environment(Config(), {name: f"{long('a')},sk-change-me"})


def test_empty_variables_are_not_set() -> None:
    empty = {"PENSTOCK_HOST": "", "PENSTOCK_PORT": " ", "PENSTOCK_API_KEY": ","}
    assert with_environment(Config(), empty) == with_environment(Config(), {}) == Config()


@pytest.mark.parametrize("port", ["http", "-1", "65536", "8000.0", "１２", "999999999"])
def test_a_port_that_is_none(port: str) -> None:
    with pytest.raises(ConfigError, match="PENSTOCK_PORT: expected a port between 0 and 65535"):
        with_environment(Config(), {"PENSTOCK_PORT": port})


# --- back to YAML --------------------------------------------------------------------------------


def test_the_dump_loads_to_the_same_config() -> None:
    config = Config(
        models=(
            ModelConfig(path="/a b/c: #d", name="naïve", engine=EngineConfig(kv_memory_bytes=2**40)),
            ModelConfig(path="null"),
        ),
        server=ServerConfig(host="::", port=0),
        auth=AuthConfig(keys=("1234", "yes", "a" * 200)),
    )
    assert parse_config(dump_config(config)) == config
    assert parse_config(dump_config(Config())) == Config()


names = st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs", "Cn", "Co"]), max_size=20)


@settings(max_examples=30, deadline=None)
@given(path=names, keys=st.lists(names, max_size=3), seconds=st.floats(0, 1e9))
def test_any_dump_loads_to_the_same_config(path: str, keys: list[str], seconds: float) -> None:
    config = Config(
        models=(ModelConfig(path=path),),
        auth=AuthConfig(keys=tuple(keys)),
        server=ServerConfig(drain_timeout_s=seconds),
    )
    assert parse_config(dump_config(config)) == config


def test_the_dump_explains_every_section() -> None:
    text = dump_config(Config())
    assert "# The HTTP front door.\nserver:\n" in text
    assert "  # 0 takes a free one.\n  port: 8000\n" in text
    assert "models:\n    # A Hugging Face model directory" in text
    assert "  - path: penstock-demo\n" in text
    for line in text.splitlines():
        key = line.strip().lstrip("- ").partition(":")[0]
        assert line.strip().startswith("#") or key.isidentifier(), line


def test_every_section_has_a_note() -> None:
    notes = read_notes()
    for field in msgspec.structs.fields(Config):
        kind = type(getattr(Config(), field.name))
        assert kind is tuple or notes[kind.__name__, ""]
