import argparse

import pytest

from penstock.cli.flags import default_port, default_url, size
from penstock.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0", 0),
        ("1000", 1000),
        ("512M", 512 << 20),
        ("2GiB", 2 << 30),
        ("1.5 kb", 1536),
        ("1t", 1 << 40),
        ("7b", 7),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "-1", "GiB", "1e9", "1x", "nan", "9" * 20])
def test_wrong_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError):
        size(text)


def test_the_environment_names_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_url() == "http://127.0.0.1:8000/v1"
    monkeypatch.setenv("PENSTOCK_PORT", "9001")
    assert default_url() == "http://127.0.0.1:9001/v1"
    monkeypatch.setenv("PENSTOCK_URL", "https://host/v1")
    assert default_url() == "https://host/v1"


@pytest.mark.parametrize("text", ["x", "70000", "-1", "1.5", "٣"])
def test_a_wrong_port_variable_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("PENSTOCK_PORT", text)
    with pytest.raises(ConfigError, match="PENSTOCK_PORT"):
        default_port()
