"""Addresses as the configuration writes them: ``host:port``, ``[v6]:port``."""

import ipaddress
import re
from typing import Final

_ADDRESS: Final = re.compile(r"(?:\[(?P<v6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+)):(?P<port>[0-9]{1,5})")


def split_address(address: str) -> tuple[str, int]:
    """Give host (without brackets) and port.

    Raises:
        ValueError: it is not of this form.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or int(match["port"]) > 65535:
        raise ValueError(f"{address!r} is not host:port")
    return match["v6"] or match["host"], int(match["port"])


def join_address(host: str, port: int) -> str:
    """Give the text ``split_address`` reads."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Say whether only this machine can be at ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
