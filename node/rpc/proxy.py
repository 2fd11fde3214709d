"""The proxy of the environment: which variable gRPC follows, and where it must not.

gRPC follows grpc_proxy, https_proxy or http_proxy, the first of them that is set, on every connection that
no_grpc_proxy or no_proxy does not name: to loopback and to private networks as well, where no proxy leads.
So here calls to such addresses never go through it, nor to names that stand for such addresses alone.
"""

import asyncio
import functools
import ipaddress
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Final
from urllib.parse import urlsplit

logger = logging.getLogger(__name__)

FOLLOWED: Final = ("grpc_proxy", "https_proxy", "http_proxy")
"""Variables that gRPC reads, in its order. It does not read them in capitals, nor all_proxy."""

OTHERS: Final = ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "all_proxy")

LOOKUP_S: Final = 2.0
"""Longest wait for a name's addresses, once for each name and only where a proxy is set. Behind a proxy the
name servers often know nothing of the world: then the proxy looks the name up."""


@dataclass(frozen=True, slots=True)
class Proxy:
    """A proxy that a variable names."""

    variable: str
    address: str
    """host:port; without what the variable may hold of a user and a password."""
    authorization: str = ""
    """user:password as the variable has them; empty: none."""

    def __str__(self) -> str:
        return f"{self.variable} (http://{self.address})"


def proxy_in(environ: Mapping[str, str]) -> Proxy | None:
    """Return the proxy that gRPC would take for an address of the Internet; None: no variable names one."""
    variable = next((name for name in FOLLOWED if name in environ), None)
    if variable is None:
        return None
    try:
        url = urlsplit(environ[variable])
        host, port = url.hostname, url.port or 80
    except ValueError:
        return None
    if url.scheme != "http" or not host:
        return None  # gRPC takes no other kind, and goes without one
    authorization = url.netloc.rpartition("@")[0]
    return Proxy(variable, f"[{host}]:{port}" if ":" in host else f"{host}:{port}", authorization)


def proxy_for(
    host: str, *, environ: Mapping[str, str], addresses_of: Callable[[str], Iterable[str]]
) -> Proxy | None:
    """Return the proxy on the way to ``host``, a name or an address; None: there is none.

    ``addresses_of`` is asked only about a name, and returns nothing where it is not known here.
    """
    proxy = proxy_in(environ)
    if proxy is None or _is_named(host, environ.get("no_grpc_proxy", environ.get("no_proxy", ""))):
        return None
    return None if is_near(host, addresses_of=addresses_of) else proxy


def is_near(host: str, *, addresses_of: Callable[[str], Iterable[str]]) -> bool:
    """Return whether ``host`` is this machine, a private network or a link: no proxy leads there."""
    found = [host] if _address(host) else ["127.0.0.1"] if _is_localhost(host) else list(addresses_of(host))
    return bool(found) and not any(map(is_global, found))


def is_global(address: str) -> bool:
    """Return whether an address is of the Internet: not of this machine, a private network or a link."""
    found = _address(address)
    if isinstance(found, ipaddress.IPv6Address) and found.ipv4_mapped is not None:
        found = found.ipv4_mapped
    return found is not None and found.is_global


def proxy_to(host: str) -> Proxy | None:
    """Return the proxy on the way to ``host`` from this process, and log it, once for each host."""
    proxy = proxy_for(host, environ=os.environ, addresses_of=addresses_here)
    if (named := proxy_in(os.environ)) is not None:
        _log_once(host, proxy, named)
    if proxy is not None:
        _followed[host] = proxy
    return proxy


async def follows_proxy(host: str) -> bool:
    """Return whether an HTTP library may follow what the environment says about ``host``."""
    if not any(name in os.environ for name in (*FOLLOWED, *OTHERS)):
        return False
    return not await asyncio.to_thread(is_near, host, addresses_of=addresses_here)


def spare_private_networks(environ: MutableMapping[str, str]) -> None:
    """Name private networks in no_proxy, for libraries that read the environment by themselves.

    obstore reads networks there. IPv6 has none: httpx fails at them.
    """
    if any(name in environ for name in (*FOLLOWED, *OTHERS)):
        for name in ("no_proxy", "NO_PROXY"):
            known = environ.get(name, environ.get("no_proxy", ""))
            environ[name] = ",".join(filter(None, (known, *_PRIVATE)))


_PRIVATE: Final = (
    "localhost",
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
)


def ways_followed() -> str:
    """Say which calls of this process go through which proxy; empty: none does."""
    return ", ".join(f"calls to {host} go through {proxy}" for host, proxy in _followed.items())


_followed: Final[dict[str, Proxy]] = {}


@functools.cache
def _log_once(host: str, proxy: Proxy | None, named: Proxy) -> None:
    if proxy is not None:
        logger.info("connects through a proxy", extra={"host": host, "proxy": str(proxy)})
    else:
        why = "loopback, private, or named in no_proxy"
        logger.info("proxy not used", extra={"host": host, "proxy": str(named), "detail": why})


@functools.cache
def addresses_here(name: str) -> tuple[str, ...]:
    """Return a name's addresses as this machine knows them; none where it does not tell within LOOKUP_S."""
    found: list[str] = []

    def look_up() -> None:
        try:
            told = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):
            return
        found.extend(sorted({str(one[4][0]) for one in told}))

    # Nothing ends a lookup: where a name server is gone, its thread goes on for half a minute.
    looking = threading.Thread(target=look_up, name="name lookup", daemon=True)
    looking.start()
    looking.join(LOOKUP_S)
    return tuple(found)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _is_localhost(name: str) -> bool:
    return name.rstrip(".").lower() == "localhost" or name.rstrip(".").lower().endswith(".localhost")


def _is_named(host: str, exceptions: str) -> bool:
    """Return whether a no_proxy list names a host, as gRPC reads it: by its end, or by a network."""
    for entry in filter(None, map(str.strip, exceptions.split(","))):
        if host.lower().endswith(entry.lower()):
            return True
        if "/" in entry and (address := _address(host)) is not None:
            try:
                if address in ipaddress.ip_network(entry, strict=False):
                    return True
            except ValueError:
                continue
    return False
