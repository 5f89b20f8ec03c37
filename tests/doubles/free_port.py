"""A port for a server that is started later, by another process."""

import itertools
import os
import socket

FIRST, COUNT = 20_000, 12_000
"""Below what kernels give to whoever asks for any port (Linux: from 32,768): nobody gets one of these by
chance before its server has it."""
_numbers = itertools.count(os.getpid() * 61)


def free_port() -> int:
    """On the loopback; another one each time. Processes of one test run begin at different places."""
    for number in itertools.islice(_numbers, COUNT):
        port = FIRST + number % COUNT
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise AssertionError(f"no port is free from {FIRST} to {FIRST + COUNT}")
