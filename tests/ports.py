"""A port for a process that has to be told one, because it is to be found there again after its restart.

Everything else binds port 0 and keeps what it got. Ports of that kind and of outgoing connections come from the range that
the kernel gives out by itself; this one lies below, so no other test takes it while its process is not there.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

FIRST_PORT = 12_000
GIVEN_OUT = Path("/proc/sys/net/ipv4/ip_local_port_range")


def quiet_port() -> int:
    """A port of the loopback address that nobody listens on and the kernel gives to nobody who does not name it."""
    last = int(GIVEN_OUT.read_text().split()[0]) if GIVEN_OUT.exists() else 32_768
    dice = random.Random()  # seeded by the system: processes that run these tests side by side choose apart
    while True:
        port = dice.randrange(min(FIRST_PORT, last // 2), last)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
