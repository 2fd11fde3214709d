import pytest

from node.errors import ConfigError
from node.rpc.address import (
    check_host,
    check_target,
    is_loopback,
    join_address,
    split_address,
    split_target,
)


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
    ("host", "rule", "fix"),
    [
        ("[::1]", "an IPv6 address has no brackets here", "Write --host ::1."),
        ("[hub]", "a host is a name or an IP address", "For example: --host hub.example.org"),
        ("hub:7700", "a host has no port", "Write --host hub."),
        ("a b:7700", "a host is a name or an IP address", "For example: --host hub.example.org"),
        ("hub:x", "a host is a name or an IP address", "For example: --host hub.example.org"),
        ("", "a host is a name or an IP address", "For example: --host hub.example.org"),
    ],
)
def test_a_host_with_more_than_a_host_says_what_is_too_much(host: str, rule: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        check_host(host, flag="--host")
    assert fix in str(error.value)


@pytest.mark.parametrize("host", ["hub", "hub.example.org", "10.0.0.1", "::1", "fe80::1"])
def test_a_host_is_a_name_or_an_address_without_a_port(host: str) -> None:
    assert check_host(host, flag="--host") == host


@pytest.mark.parametrize("address", ["hub:1", "[::1]:65535"])
def test_an_address_with_a_port_can_be_dialled(address: str) -> None:
    assert split_target(address) == split_address(address)
    assert check_target(address, flag="--coordinator", example_port=7700) == address


@pytest.mark.parametrize(
    ("address", "rule", "fix"),
    [
        ("hub", "the port is missing", "--coordinator hub:7700"),
        ("hub:0", "cannot be dialled: port 0", "--coordinator hub:7700"),
        ("a b:1", "neither a name nor an address", "--coordinator HOST:7700"),
        ("::1", "write an IPv6 address in brackets", "--coordinator HOST:7700"),
    ],
)
def test_an_address_that_cannot_be_dialled_says_what_to_write(address: str, rule: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        check_target(address, flag="--coordinator", example_port=7700)
    assert str(error.value).endswith(f"For example: {fix}")
