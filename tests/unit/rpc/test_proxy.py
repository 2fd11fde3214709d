import logging
import os
from collections.abc import Iterator, Mapping

import grpc.aio
import pytest

from node.identity.peer import Peer
from node.rpc import proxy
from node.rpc.channel import Purpose, dial
from node.rpc.proxy import is_global, proxy_for, proxy_in, spare_private_networks
from node.values.roles import Role

HTTPS = {"https_proxy": "http://proxy.example:3128"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*proxy.FOLLOWED, *proxy.OTHERS, "no_proxy", "NO_PROXY", "no_grpc_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(proxy, "_followed", {})
    yield
    proxy.addresses_here.cache_clear()
    proxy._log_once.cache_clear()


@pytest.mark.parametrize(
    ("environ", "variable", "address"),
    [
        ({}, None, None),
        (HTTPS, "https_proxy", "proxy.example:3128"),
        (
            {**HTTPS, "grpc_proxy": "http://[fd00::1]:80", "http_proxy": "http://b:1"},
            "grpc_proxy",
            "[fd00::1]:80",
        ),
        ({"http_proxy": "http://user:pass@proxy.example"}, "http_proxy", "proxy.example:80"),
        ({"grpc_proxy": "", **HTTPS}, None, None),
        ({"https_proxy": "socks5://proxy.example:1080"}, None, None),
        ({"https_proxy": "proxy.example:3128"}, None, None),
        ({"https_proxy": "http://proxy.example:port"}, None, None),
        ({"HTTPS_PROXY": "http://proxy.example:3128", "ALL_PROXY": "http://proxy.example:3128"}, None, None),
    ],
)
def test_the_proxy_is_that_of_the_variable_that_grpc_reads_first(
    environ: Mapping[str, str], variable: str | None, address: str | None
) -> None:
    found = proxy_in(environ)
    assert (found and found.variable, found and found.address) == (variable, address)
    assert "pass" not in str(found)


KNOWN = {
    "hub.home": ["127.0.0.1", "::1"],
    "hub.lan": ["10.1.2.3", "fd00::7"],
    "hub.example.org": ["8.8.8.8"],
    "hub.both": ["192.168.1.1", "2606:4700::1111"],
}
NEAR = [
    *("127.0.0.1", "127.8.9.1", "::1", "localhost", "LOCALHOST.", "a.localhost", "hub.home"),
    *("10.1.2.3", "172.31.0.1", "192.168.0.1", "169.254.1.1", "100.64.0.1", "hub.lan"),
    *("fd00::1", "fe80::1%eth0", "::ffff:10.0.0.1", "0.0.0.0"),
]
FAR = ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "hub.example.org", "hub.both", "unknown.example"]
EXCEPTED = [
    ("hub.example.org", "example.org", False),
    ("hub.example.org", "a.b, .EXAMPLE.org", False),
    ("8.8.8.8", "8.8.0.0/16", False),
    ("8.8.8.8", "8.8.8.8", False),
    ("8.8.8.8", "9.9.0.0/16,nonsense/99", True),
]


@pytest.mark.parametrize(
    ("host", "exceptions", "is_used"),
    [*((host, "", False) for host in NEAR), *((host, "", True) for host in FAR), *EXCEPTED],
)
def test_no_proxy_is_on_the_way_to_this_machine_or_a_private_network(
    host: str, exceptions: str, is_used: bool
) -> None:
    environ = {**HTTPS, "no_proxy": exceptions}
    found = proxy_for(host, environ=environ, addresses_of=lambda name: KNOWN.get(name, []))
    assert (found is not None) == is_used


def test_no_name_is_looked_up_where_no_proxy_is_set() -> None:
    def look_up(name: str) -> list[str]:
        raise AssertionError(name)

    assert proxy_for("hub.example.org", environ={}, addresses_of=look_up) is None


def test_a_name_that_is_not_known_is_not_global() -> None:
    assert not is_global("hub.example.org")


@pytest.mark.parametrize("target", ["127.0.0.1:7700", "localhost:7700"])
def test_a_channel_to_this_machine_uses_none_and_that_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, target: str
) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@127.0.0.1:9")
    dialled: list[Mapping[str, object]] = []
    monkeypatch.setattr(grpc.aio, "insecure_channel", lambda target, options: dialled.append(dict(options)))
    caplog.set_level(logging.INFO, "node.rpc.proxy")
    for _ in range(3):
        dial(target, Peer("run", Role.SAMPLER, "s1"), purpose=Purpose.CONTROL, now=0.0)
    assert [options["grpc.enable_http_proxy"] for options in dialled] == [0, 0, 0]
    [told] = caplog.records
    assert (told.message, vars(told)["proxy"]) == ("proxy not used", "https_proxy (http://127.0.0.1:9)")


def test_a_call_that_is_lost_behind_a_proxy_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("grpc_proxy", "http://127.0.0.1:9")
    assert proxy.ways_followed() == ""
    assert proxy.proxy_to("8.8.8.8") is not None
    assert proxy.ways_followed() == "calls to 8.8.8.8 go through grpc_proxy (http://127.0.0.1:9)"


@pytest.mark.parametrize("variable", ["HTTPS_PROXY", "http_proxy", "ALL_PROXY"])
def test_libraries_that_read_the_environment_spare_private_networks(
    monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    untouched = dict(os.environ)
    spare_private_networks(os.environ)
    assert dict(os.environ) == untouched
    environ = {variable: "http://p:1", "no_proxy": "example.org"}
    spare_private_networks(environ)
    assert environ["no_proxy"].startswith("example.org,localhost,127.0.0.0/8,10.0.0.0/8")
    assert environ["NO_PROXY"].startswith("example.org,")
