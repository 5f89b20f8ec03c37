import argparse
from pathlib import Path

import pytest

from penstock.cli.commands.serve import effective_config, printable_config
from penstock.cli.main import build_parser
from penstock.config.load import parse_config, with_environment
from penstock.config.tree import Config, ModelConfig
from penstock.errors import ConfigError


def flags(*argv: str) -> argparse.Namespace:
    return build_parser().parse_args(["serve", *argv])


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "p.yaml"
    path.write_text(text)
    return str(path)


def test_without_anything_it_is_the_default() -> None:
    assert effective_config(flags(), {}) == Config()


def test_flag_then_environment_then_file_then_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = write(tmp_path, "server: {port: 1001, host: '127.0.0.2'}\nauth: {keys: [from-file-0123456]}")
    from_file = effective_config(flags("-c", file), {})
    assert (from_file.server.port, from_file.server.host) == (1001, "127.0.0.2")
    assert from_file.auth.keys == ("from-file-0123456",)

    environ = {"PENSTOCK_PORT": "1002", "PENSTOCK_HOST": "127.0.0.3", "PENSTOCK_API_KEY": "from-env-01234567"}
    from_env = effective_config(flags("-c", file), environ)
    assert (from_env.server.port, from_env.server.host, from_env.auth.keys) == (
        1002,
        "127.0.0.3",
        ("from-env-01234567",),
    )

    argv = ("-c", file, "--port", "1003", "--host", "127.0.0.4", "--api-key", "from-flag-0123456")
    from_flag = effective_config(flags(*argv), environ)
    assert (from_flag.server.port, from_flag.server.host) == (1003, "127.0.0.4")
    assert from_flag.auth.keys == ("from-flag-0123456",)


def test_engine_flags_count_for_every_model(tmp_path: Path) -> None:
    file = write(tmp_path, "models: [{path: a, engine: {restarts_max: 5}}, {path: b}]")
    argv = (
        "-c",
        file,
        "--dtype",
        "float32",
        "--load-format",
        "random",
        "--quantization",
        "int8",
        "--kv-memory",
        "1G",
        "--threads",
        "2",
        "--max-model-len",
        "512",
    )
    for model in effective_config(flags(*argv), {}).models:
        engine = model.engine
        assert engine.quantization == "int8"
        assert engine.load_format == "random"
        assert (engine.dtype, engine.kv_memory_bytes, engine.threads, engine.max_model_len) == (
            "float32",
            1 << 30,
            2,
            512,
        )
    assert effective_config(flags(*argv), {}).models[0].engine.restarts_max == 5


def test_a_model_on_the_command_line_replaces_those_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path, "models: [{path: a}, {path: b}]\nserver: {port: 7}")
    config = effective_config(flags("c", "-c", file, "--name", "d"), {})
    assert config.models == (ModelConfig(path="c", name="d"),)
    assert config.server.port == 7


@pytest.mark.parametrize(
    ("argv", "file", "complaint"),
    [
        (("--host", "0.0.0.0"), "", "reachable from other machines; set them or PENSTOCK_API_KEY"),
        (("--host", "0.0.0.0", "--no-auth"), "", "auth.disabled: refused"),
        (("--no-auth", "--api-key", "x"), "", "contradict"),
        (("--api-key", "two words"), "", "visible ASCII"),
        (("--api-key", "sk-change-me"), "", r"auth\.keys\[0\]: a key of 12 characters is too short"),
        ((), "auth: {admin_keys: [k]}", r"auth\.admin_keys\[0\]: a key of 1 characters is too short"),
        (("--name", "x"), "models: [{path: a}, {path: b}]", "--name names one model"),
        ((), "models: [{path: x/a}, {path: y/a}]", "'a' is the name of"),
        ((), "models: []", "at least one"),
    ],
)
def test_combinations_that_are_refused(
    tmp_path: Path, argv: tuple[str, ...], file: str, complaint: str
) -> None:
    with pytest.raises(ConfigError, match=complaint):
        effective_config(flags(*argv, "-c", write(tmp_path, file)), {})


def test_a_key_opens_other_addresses() -> None:
    config = effective_config(flags("--host", "0.0.0.0"), {"PENSTOCK_API_KEY": "k" * 16})
    assert config.server.host == "0.0.0.0"


def test_the_printed_config_is_a_config_without_secrets() -> None:
    config = effective_config(
        flags("--api-key", "very-secret-indeed"),
        {"PENSTOCK_ADMIN_KEY": "very-secret-admins", "PENSTOCK_SCRAPE_KEY": "very-secret-scrapers"},
    )
    text = printable_config(config)
    assert "very-secret" not in text
    assert parse_config(text, source="x").server == config.server


def test_the_password_of_the_shared_store_is_not_shown() -> None:
    config = with_environment(Config(), {"PENSTOCK_SHARED_URL": "rediss://user:pass@host:6380/0"})
    text = printable_config(config)
    assert "pass@" not in text
    assert "@host:6380/0" in text
