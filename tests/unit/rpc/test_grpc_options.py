"""gRPC ignores an option it does not know, without a word: the compiled core says what it knows."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.rpc.channel import Keepalive
from support.present import present

ROOT = Path(__file__).resolve().parents[3]
PACKAGES = ("node", "learner", "sampler", "deploy", "bench")
_OPTION = re.compile(r"grpc(\.[a-z0-9_]+)+")


def options_used() -> Iterator[tuple[str, str]]:
    """Return every string that is the name of an option, and the file it stands in."""
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if '"grpc.' not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            value = node.value if isinstance(node, ast.Constant) else None
            if isinstance(value, str) and _OPTION.fullmatch(value) and not value.startswith("grpc.aio"):
                yield value, str(path.relative_to(ROOT))


@pytest.fixture(scope="module")
def core() -> bytes:
    """The compiled core, which holds the name of every option it reads."""
    spec = present(importlib.util.find_spec("grpc._cython.cygrpc"))
    assert spec.origin is not None
    return Path(spec.origin).read_bytes()


def test_every_option_is_one_that_grpc_reads(core: bytes) -> None:
    used = set(options_used())
    assert len(used) > 10
    unknown = sorted((option, file) for option, file in used if f"{option}\0".encode() not in core)
    assert unknown == []


def test_keepalive_is_told_to_grpc_in_milliseconds() -> None:
    keepalive = Keepalive(ping_after_s=20.0, give_up_after_s=10.0, allowed_every_s=2.5)
    assert dict(keepalive.client_options)["grpc.keepalive_time_ms"] == 20_000
    assert dict(keepalive.client_options)["grpc.keepalive_timeout_ms"] == 10_000
    assert dict(keepalive.server_options)["grpc.http2.min_ping_interval_without_data_ms"] == 2_500


def test_a_client_pings_for_as_long_as_it_sends_nothing_else() -> None:
    options = dict(Keepalive().client_options)
    assert options["grpc.http2.max_pings_without_data"] == 0  # no limit
    assert options["grpc.keepalive_permit_without_calls"] == 1


def test_a_misspelt_option_would_be_found(core: bytes) -> None:
    assert b"grpc.http2.min_recv_ping_interval_without_data_ms\0" not in core
