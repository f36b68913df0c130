"""Calls that leave this machine, from Python's audit events: connections, datagrams and look-ups of names.

python network.py ARGUMENTS    runs `posttrain ARGUMENTS` and ends with status 3 and a list if there were any
"""

import ipaddress
import sys
from collections.abc import Iterator
from contextlib import contextmanager

EVENTS = ("socket.connect", "socket.sendto", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr")
_heard: list[list[str]] = []


def _is_here(host: object) -> bool:
    if isinstance(host, bytes):
        host = host.decode(errors="replace")
    if not isinstance(host, str) or host in ("", "localhost"):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _hear(event: str, given: tuple) -> None:
    if not _heard or event not in EVENTS:
        return
    address = given[1] if event in ("socket.connect", "socket.sendto") else given[0]
    if isinstance(address, (str, bytes)) and event in ("socket.connect", "socket.sendto"):
        return  # a Unix socket's path
    host = address[0] if isinstance(address, tuple) else address
    if not _is_here(host):
        _heard[-1].append(f"{event} {address}")


@contextmanager
def calls_outside() -> Iterator[list[str]]:
    """The calls that this process makes inside the block; those of its children it does not hear."""
    if not _hooked:
        sys.addaudithook(_hear)  # for the life of the process: it cannot be removed
        _hooked.append(True)
    _heard.append([])
    try:
        yield _heard[-1]
    finally:
        _heard.pop()


_hooked: list[bool] = []

if __name__ == "__main__":
    with calls_outside() as calls:
        from posttrain.cli import main

        status = main(sys.argv[1:])
    print("\n".join(calls), file=sys.stderr)
    sys.exit(3 if calls else status)
