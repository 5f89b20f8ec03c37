import pytest

from penstock.protocol.address import TcpAddress, UnixAddress, parse_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("unix:/run/w.sock", UnixAddress("/run/w.sock")),
        ("tcp:10.0.0.1:7000", TcpAddress("10.0.0.1", 7000)),
        ("tcp:[::1]:7000", TcpAddress("::1", 7000)),
    ],
)
def test_addresses_are_written_as_they_are_read(text: str, address: UnixAddress | TcpAddress) -> None:
    assert parse_address(text) == address
    assert str(address) == text


@pytest.mark.parametrize("text", ["", "unix:", "/run/w.sock", "tcp:host", "tcp::1", "tcp:h:70000", "udp:h:1"])
def test_anything_else_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a worker address"):
        parse_address(text)


def test_a_path_that_the_kernel_would_cut_is_refused() -> None:
    with pytest.raises(ValueError, match="longer than"):
        parse_address("unix:/" + "x" * 200)
