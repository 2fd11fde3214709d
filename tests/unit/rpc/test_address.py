import pytest

from node.rpc.address import is_host, is_loopback, join_address, split_address, split_target
from support.refusals import naming


@pytest.mark.parametrize(
    ("address", "host", "port"),
    [
        ("127.0.0.1:7400", "127.0.0.1", 7400),
        ("hub.example.org:0", "hub.example.org", 0),
        ("[::1]:65535", "::1", 65535),
        ("0.0.0.0:1", "0.0.0.0", 1),
    ],
)
def test_an_address_is_split_and_joined_again(address: str, host: str, port: int) -> None:
    assert split_address(address) == (host, port)
    assert join_address(host, port) == address


@pytest.mark.parametrize(
    "address",
    [
        "",
        ":1",
        "hub",
        "hub:",
        "hub:65536",
        "::1:80",
        "[::1:80",
        "::1]:80",
        "[hub]:80",
        "[::1x]:80",
        "hub:-1",
        "hub:http",
        "a b:1",
        "hub:1/x",
        "dns:///hub:1",
        "hub:1\n",
    ],
)
def test_anything_else_is_no_address(address: str) -> None:
    with pytest.raises(ValueError, match="is not host:port"):
        split_address(address)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.9.10", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example.org", False),
        ("127.0.0.1.example.org", False),
    ],
)
def test_only_this_machine_is_loopback(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((good, True) for good in ("hub", "hub.example.org", "10.0.0.1", "::1", "fe80::1")),
        *((bad, False) for bad in ("[::1]", "[hub]", "hub:7700", "a b", "a b:7700", "")),
    ],
)
def test_a_host_is_a_name_or_an_address_without_port_and_brackets(text: str, expected: bool) -> None:
    assert is_host(text) is expected


def test_an_address_with_a_port_can_be_dialled_and_port_zero_cannot() -> None:
    assert split_target("hub:1") == ("hub", 1)
    with naming(ValueError, "'hub:0'"):
        split_target("hub:0")
