"""A process's own identity and its next certificates."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.enrolment.authority import Authority
from node.errors import Reason
from node.identity.certificates import CLOCK_SKEW_S, new_key, read_curve_key
from node.identity.identity_store import Identity, load_identity, save_identity
from node.identity.own_identity import OwnIdentity, RenewedCertificates, is_due
from node.identity.peer import Peer
from node.values.roles import Role
from support.identity import MadeRun, make_run
from support.refusals import refused

DAY_S = 86400.0


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=time.time())


@pytest.fixture
def own(made: MadeRun, tmp_path: Path) -> OwnIdentity:
    save_identity(made.sampler, tmp_path / "identity")
    return OwnIdentity(made.sampler, tmp_path / "identity")


def renewed(made: MadeRun, *, peer: Peer | None = None, after_s: float = 300 * DAY_S) -> bytes:
    key = read_curve_key(made.sampler.key_pem).public_key()
    return made.authority.issue(peer or made.sampler.peer, key, now=made.made_at_s + after_s)


def test_a_new_certificate_is_kept_and_told_and_the_key_stays(
    made: MadeRun, own: OwnIdentity, tmp_path: Path
) -> None:
    heard: list[Identity] = []
    own.watch(heard.append)
    own.renew(renewed(made))
    assert own.renewals == 1
    assert own.current == load_identity(tmp_path / "identity") == heard[-1]
    assert heard[0] == made.sampler
    assert own.current.key_pem == made.sampler.key_pem
    assert own.current.not_after_s == pytest.approx(made.sampler.not_after_s + 300 * DAY_S, abs=1)


def test_what_is_not_a_later_certificate_of_this_peer_and_key_changes_nothing(
    made: MadeRun, own: OwnIdentity, tmp_path: Path
) -> None:
    stranger = Authority.create(made.run_id, now=made.made_at_s)
    key = read_curve_key(made.sampler.key_pem).public_key()
    offered = (
        b"no certificate",
        renewed(made, peer=Peer(made.run_id, Role.SAMPLER, "another")),
        renewed(made, peer=Peer(made.run_id, Role.RELAY, made.sampler.node_id)),
        renewed(made, after_s=-DAY_S),
        made.sampler.certificate_pem,
        made.authority.issue(made.sampler.peer, new_key().public_key(), now=made.made_at_s + DAY_S),
        stranger.issue(made.sampler.peer, key, now=made.made_at_s + DAY_S),
    )
    for certificate_pem in offered:
        with refused(Reason.MALFORMED):
            own.renew(certificate_pem)
    assert (own.current, own.renewals) == (made.sampler, 0)
    assert load_identity(tmp_path / "identity") == made.sampler


@given(st.floats(10, 4e8), st.floats(-0.5, 1.5))
def test_a_certificate_is_due_in_the_last_third_of_its_time(lifetime_s: float, part: float) -> None:
    made_at_s = 1.8e9
    due = is_due(made_at_s - CLOCK_SKEW_S, made_at_s + lifetime_s, now=made_at_s + part * lifetime_s)
    if abs(part - 2 / 3) > 1e-5:
        assert due == (part > 2 / 3)


def test_a_hub_knows_until_when_a_key_is_good_and_forgets_what_has_expired(made: MadeRun) -> None:
    certificates = RenewedCertificates()
    old, now = made.sampler.certificate_pem, made.made_at_s
    assert certificates.not_after_s(old) == 0
    certificates.note(renewed(made), now=now)
    assert certificates.not_after_s(old) == pytest.approx(made.sampler.not_after_s + 300 * DAY_S, abs=1)
    assert certificates.not_after_s(made.other_sampler.certificate_pem) == 0
    certificates.note(made.other_sampler.certificate_pem, now=now + 1000 * DAY_S)
    assert certificates.not_after_s(old) == 0
