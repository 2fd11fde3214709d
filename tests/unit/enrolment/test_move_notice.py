"""Notices of where the coordinator will be: whose word counts, and what a peer remembers."""

import logging
import time
from pathlib import Path

import pytest

from node.enrolment.authority import Authority
from node.enrolment.move_notice import (
    FILE_NAME,
    NOTICE_BYTES,
    MovedCoordinator,
    MoveNotice,
    sign_move,
)
from node.enrolment.tokens import Token, issue_token
from node.errors import Reason, RefusedError
from node.rpc.hub import Hub
from node.values.roles import Role
from support.identity import MadeRun, make_run
from support.refusals import refused

OLD, NEW, NEWER = "old.example.net:7700", "new.example.net:7700", "newer.example.net:7700"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=time.time())


def notice(made: MadeRun, *addresses: str, at_s: float = 0.0) -> bytes:
    return sign_move(made.authority, addresses, now=made.made_at_s + at_s)


def test_a_peer_dials_the_new_address_after_its_next_loss_and_at_once_after_a_restart(
    made: MadeRun, tmp_path: Path
) -> None:
    def moved() -> MovedCoordinator:
        return MovedCoordinator(Hub(OLD), made.run, tmp_path)

    running = moved()
    running.hub.add_channel(channel := _Channel())  # type: ignore[arg-type]
    running.learn(notice(made, NEW))
    assert running.hub.address == OLD
    running.hub.move_on_after(RefusedError(Reason.DRAINING, "it stops"))
    assert running.hub.address == NEW
    assert moved().hub.addresses == (NEW, OLD)
    assert moved().hub.address == NEW
    del channel


class _Channel:
    """One that was dialled."""


def test_the_hub_of_the_weights_moves_too_whenever_it_was_made(made: MadeRun, tmp_path: Path) -> None:
    moved = MovedCoordinator(Hub("", relays=["relay.example.net:7700"]), made.run, tmp_path)
    early = moved.follow(Hub(OLD))
    moved.learn(notice(made, NEW))
    late = moved.follow(Hub(OLD))
    assert early.addresses == late.addresses == (NEW, OLD)
    assert moved.hub.addresses == ("relay.example.net:7700",)


def test_a_newer_notice_replaces_an_older_one_and_no_replay_brings_that_back(
    made: MadeRun, tmp_path: Path
) -> None:
    moved = MovedCoordinator(Hub(OLD), made.run, tmp_path)
    moved.learn(notice(made, NEW))
    moved.learn(notice(made, NEWER, at_s=1))
    moved.learn(notice(made, NEW))
    assert moved.hub.addresses == (NEWER, OLD)
    assert MovedCoordinator(Hub(OLD), made.run, tmp_path).hub.addresses == (NEWER, OLD)


def test_a_peer_that_has_moved_is_moved_again_and_goes_round_all_addresses(
    made: MadeRun, tmp_path: Path
) -> None:
    moved = MovedCoordinator(Hub(OLD), made.run, tmp_path)
    moved.learn(notice(made, NEW))
    moved.hub.add_channel(channel := _Channel())  # type: ignore[arg-type]
    moved.learn(notice(made, NEWER, at_s=1))
    seen = [moved.hub.address]
    for _ in range(3):
        moved.hub.move_on_after(RefusedError(Reason.DRAINING, "it stops"))
        seen.append(moved.hub.address)
    assert seen == [NEW, NEWER, OLD, NEW]
    del channel


def test_a_peer_of_relays_alone_goes_on_with_them(made: MadeRun, tmp_path: Path) -> None:
    moved = MovedCoordinator(Hub("", relays=["relay.example.net:7700"]), made.run, tmp_path)
    moved.learn(notice(made, NEW))
    assert moved.hub.addresses == ("relay.example.net:7700",)


def test_a_peer_keeps_its_relays_before_the_new_address(made: MadeRun, tmp_path: Path) -> None:
    moved = MovedCoordinator(Hub(OLD, relays=["relay.example.net:7700"]), made.run, tmp_path)
    moved.learn(notice(made, NEW))
    assert moved.hub.addresses == ("relay.example.net:7700", NEW, OLD)


def test_nobody_but_the_runs_authority_moves_a_peer(
    made: MadeRun, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Authority.create(made.run_id, now=made.made_at_s)
    good = notice(made, NEW)
    token = issue_token(made.authority, role=Role.SAMPLER, node_id=None, address=NEW, now=made.made_at_s)
    offered = [
        sign_move(other, (NEW,), now=made.made_at_s),
        token.encode(),
        good[:-1],
        good.replace(b".", b"", 1),
        b"",
        b"\xff",
        bytes(NOTICE_BYTES + 1),
        made.authority.sign_token(b"[]", typ="heterorl-move+jwt").encode(),
        made.authority.sign_token(
            b'{"iss": "another-run", "iat": 1, "addresses": ["a:1"]}', typ="heterorl-move+jwt"
        ).encode(),
        made.authority.sign_token(
            b'{"iss": "%b", "iat": 1, "addresses": ["nowhere"]}' % made.run_id.encode(),
            typ="heterorl-move+jwt",
        ).encode(),
    ]
    moved = MovedCoordinator(Hub(OLD), made.run, tmp_path)
    with caplog.at_level(logging.WARNING):
        for text in offered:
            moved.learn(text)
    assert moved.hub.addresses == (OLD,)
    assert not (tmp_path / FILE_NAME).exists()
    assert len(caplog.records) == len(offered)
    with refused(Reason.TOKEN_REFUSED):
        Token.parse(good.decode())
    assert MoveNotice.read(good, run=made.run).addresses == (NEW,)


@pytest.mark.parametrize("addresses", [(), ("host",), ("host:0",), tuple(f"h{n}:1" for n in range(9))])
def test_what_cannot_be_dialled_is_not_signed(made: MadeRun, addresses: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=r"host|addresses"):
        notice(made, *addresses)
