import socket

import psutil
import pytest

from penstock.cli.wiring.serving import reachable


@pytest.mark.parametrize("host", ["127.0.0.1", "10.0.0.7", "::1", "box.example"])
def test_an_address_is_itself(host: str) -> None:
    assert reachable(host) == host


@pytest.mark.parametrize(("host", "family"), [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)])
def test_all_addresses_are_one_of_this_machine(host: str, family: socket.AddressFamily) -> None:
    mine = {
        each.address.partition("%")[0]
        for addresses in psutil.net_if_addrs().values()
        for each in addresses
        if each.family == family
    }
    assert reachable(host) in mine | {"127.0.0.1", "::1"}
