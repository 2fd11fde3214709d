"""Addresses as flags, configuration and tokens write them: ``host:port``, ``[v6]:port``.

The port is never guessed: a coordinator listens on two, and gRPC would dial 443.
"""

import errno
import ipaddress
import re
import socket
from typing import Final

MEMBERS_PORT: Final = 7700
ENROLMENT_PORT: Final = 7701
"""The coordinator's two ports unless the configuration says otherwise; for examples and messages only."""

_HOST: Final = re.compile(r"[A-Za-z0-9._-]{1,253}")
_PORT: Final = re.compile(r"[0-9]{1,5}")


def split_address(address: str) -> tuple[str, int]:
    """Return host (without brackets) and port. Raises ValueError: it has another form; says which rule."""
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        is_host = _is_v6(host[1:-1])
        host = host[1:-1]
    elif _is_v6(address) or _is_v6(host):
        raise ValueError(f"{address!r} is not host:port: write an IPv6 address in brackets, [::1]:7700")
    else:
        is_host = _HOST.fullmatch(host) is not None
    if not colon or not port:
        raise ValueError(f"{address!r} is not host:port: the port is missing")
    if not is_host:
        raise ValueError(f"{address!r} is not host:port: {host[:100]!r} is neither a name nor an address")
    if _PORT.fullmatch(port) is None or int(port) > 65535:
        raise ValueError(f"{address!r} is not host:port: a port is a number from 0 to 65535")
    return host, int(port)


def split_target(address: str) -> tuple[str, int]:
    """Return host and port of an address to dial.

    Raises ValueError: it is not an address, or its port is 0.
    """
    host, port = split_address(address)
    if port == 0:
        raise ValueError(f"{address!r} cannot be dialled: port 0 stands for any free port to listen on")
    return host, port


def split_targets(addresses: str) -> tuple[str, ...]:
    """Return the addresses between commas, each once. Raises ValueError: one cannot be dialled."""
    found = tuple(dict.fromkeys(address.strip() for address in addresses.split(",")))
    for address in found:
        split_target(address)
    return found


def is_host(text: str) -> bool:
    """Return whether this is a name, or an address without port and brackets."""
    return _is_address(text) or _HOST.fullmatch(text) is not None


def join_address(host: str, port: int | str) -> str:
    """Return the text that ``split_address`` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def listening_socket(address: str) -> socket.socket:
    """Return a socket that listens; for 0.0.0.0 and [::] on every address of the machine, of both families.

    Raises ValueError: it is not host:port. OSError: it cannot be bound.
    """
    host, port = split_address(address)
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        try:
            return socket.create_server(
                ("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        except OSError as error:
            if host == "::" or error.errno == errno.EADDRINUSE:
                raise  # else this machine has no IPv6 address
    family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    return socket.create_server((host, port), family=family, backlog=1024)


def is_loopback(host: str) -> bool:
    """Return whether ``host`` is this machine and nothing else."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_v6(text: str) -> bool:
    return ":" in text and _is_address(text)
