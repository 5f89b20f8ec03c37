"""The section `cells`, and what binds tenants to some of them."""

import pytest

from penstock.config.checks import check
from penstock.config.load import parse_config
from penstock.errors import ConfigError
from penstock.types import places_of

GOOD = """
cells:
  here: east
  key_env: OUR_KEY
  all:
    - {name: east, url: "tcp:127.0.0.1:7101", labels: [eu, gdpr]}
    - {name: west, url: "tcp:[::1]:7102", labels: [us], egress_price: 0.02}
tenants: [{id: acme, residency: [eu, gdpr]}]
"""


def test_a_cell_knows_itself_and_its_peers() -> None:
    config = parse_config(GOOD)
    check(config)
    assert config.cells.key_env == "OUR_KEY"
    assert [cell.name for cell in config.cells.peers] == ["west"]
    assert config.cells.peers[0].egress_price == 0.02
    assert config.cells.places == places_of(("east", "eu", "gdpr")), "its name is a label, too"
    assert config.tenants[0].residency == ("eu", "gdpr")


def test_a_server_alone_has_no_place() -> None:
    config = parse_config("{}")
    check(config)
    assert not config.cells.places
    assert not config.cells.peers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            ("here: east", "here: north"),
            r"cells.here \(PENSTOCK_CELL\): there is no cell 'north'",
        ),
        (
            ("key_env: OUR_KEY", "key_env: 'a b'"),
            "cells.key_env: expected the name of an environment",
        ),
        (("name: west", "name: east"), r"cells.all\[1\].name: 'east' is that of cells.all\[0\] already"),
        (("[::1]:7102", "127.0.0.1:7101"), r"cells.all\[1\].url: 'tcp:127.0.0.1:7101' is that of"),
        (("tcp:[::1]:7102", "http://west:7102"), r"cells.all\[1\].url: expected tcp:HOST:PORT"),
        (("[::1]:7102", "west:0"), r"cells.all\[1\].url: expected tcp:HOST:PORT"),
        (("labels: [us]", "labels: ['u s']"), r"cells.all\[1\].labels\[0\]: expected 1 to 63 letters"),
        (("residency: [eu, gdpr]", "residency: [eu, us]"), r"tenants\[0\].residency: no cell has eu and us"),
        (("residency: [eu, gdpr]", "residency: [mars]"), r"tenants\[0\].residency: no cell has mars"),
    ],
)
def test_what_contradicts_itself_is_refused(change: tuple[str, str], words: str) -> None:
    assert change[0] in GOOD
    with pytest.raises(ConfigError, match=words):
        check(parse_config(GOOD.replace(*change)))


def test_labels_without_cells_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tiers\[0\].residency: there are no cells"):
        check(parse_config("tiers: [{name: free, residency: [eu]}]\nauth: {jwt: {default_tier: free}}"))
    with pytest.raises(ConfigError, match=r"cells\.all: empty"):
        check(parse_config("cells: {here: east}"))
