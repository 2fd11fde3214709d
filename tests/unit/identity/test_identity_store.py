from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from node.enrolment.authority import AUTHORITY_LIFETIME_S
from node.errors import StartupError
from node.identity.certificates import is_same_certificate, new_key
from node.identity.files import write_secret
from node.identity.identity_store import (
    check_dates,
    check_own,
    expiries,
    load_identity,
    load_or_make_key,
    save_identity,
)
from node.values.roles import Role
from support.identity import NOW_S, MadeRun, make_run
from support.refusals import cannot_start


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> MadeRun:
    return make_run(tmp_path_factory.mktemp("run"), now=NOW_S)


def test_an_identity_is_read_back_whole_and_its_key_is_its_owners_only(made: MadeRun, tmp_path: Path) -> None:
    save_identity(made.sampler, tmp_path / "deep" / "identity")
    assert load_identity(tmp_path / "deep" / "identity") == made.sampler
    assert (tmp_path / "deep" / "identity").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "deep" / "identity" / "key.pem").stat().st_mode & 0o777 == 0o600


def test_a_node_that_has_not_enrolled_has_no_identity(tmp_path: Path) -> None:
    assert load_identity(tmp_path / "nothing") is None
    load_or_make_key(tmp_path)
    assert load_identity(tmp_path) is None


def test_a_private_key_is_never_shown_with_its_identity(made: MadeRun) -> None:
    assert "PRIVATE" not in repr(made.sampler)


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "ca.pem"])
@pytest.mark.parametrize("content", [b"", b"nonsense"])
def test_a_damaged_identity_is_named_and_not_used(
    made: MadeRun, tmp_path: Path, name: str, content: bytes
) -> None:
    save_identity(made.sampler, tmp_path)
    (tmp_path / name).write_bytes(content)
    with cannot_start(str(tmp_path), "damaged"):
        load_identity(tmp_path)


@pytest.mark.parametrize("name", ["key.pem", "ca.pem"])
def test_an_incomplete_identity_is_an_error_and_not_a_new_node(
    made: MadeRun, tmp_path: Path, name: str
) -> None:
    save_identity(made.sampler, tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(StartupError):
        load_identity(tmp_path)


def test_the_key_of_another_identity_is_not_used(made: MadeRun, tmp_path: Path) -> None:
    save_identity(made.sampler, tmp_path)
    write_secret(tmp_path / "key.pem", made.other_sampler.key_pem)
    with cannot_start(str(tmp_path), "key and certificate"):
        load_identity(tmp_path)


def test_a_key_that_others_may_read_is_not_used(made: MadeRun, tmp_path: Path) -> None:
    save_identity(made.sampler, tmp_path)
    (tmp_path / "key.pem").chmod(0o644)
    with cannot_start("chmod 600", "key.pem"):
        load_identity(tmp_path)


def test_a_secret_never_goes_through_a_file_that_somebody_left_there(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_bytes(b"old")
    (tmp_path / ".key.pem.new").symlink_to(elsewhere)
    write_secret(tmp_path / "key.pem", b"secret")
    assert elsewhere.read_bytes() == b"old"
    assert (tmp_path / "key.pem").read_bytes() == b"secret"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["elsewhere", "key.pem"]


def test_a_key_to_enrol_with_is_made_once(tmp_path: Path) -> None:
    first, second = load_or_make_key(tmp_path / "identity"), load_or_make_key(tmp_path / "identity")
    assert first.public_key() == second.public_key()


def test_a_good_identity_of_each_role_passes_its_own_check(made: MadeRun) -> None:
    for role in Role:
        check_own(made.of(role), made.run, role, NOW_S)


@pytest.mark.parametrize(
    ("who", "role", "names"),
    [
        ("expired", Role.SAMPLER, ("expired at 20", "heterorl-node token DIR --role sampler")),
        ("not_yet_valid", Role.SAMPLER, ("clock",)),
        ("foreign", Role.SAMPLER, ("authority",)),
        ("sampler", Role.LEARNER, ("sampler", "learner")),
    ],
)
def test_a_certificate_that_will_not_be_let_in_is_told_why(
    made: MadeRun, who: str, role: Role, names: tuple[str, ...]
) -> None:
    with cannot_start(*names):
        check_own(getattr(made, who), made.run, role, NOW_S)


def test_a_certificate_of_another_run_is_refused(made: MadeRun, tmp_path: Path) -> None:
    other = make_run(tmp_path, now=NOW_S, run_id="other")
    with cannot_start("other", "example"):
        check_own(other.sampler, made.run, Role.SAMPLER, NOW_S)


def test_a_certificate_expires_at_the_second_it_says(made: MadeRun) -> None:
    check_dates(made.sampler, made.sampler.not_after_s - 1)
    with cannot_start("sampler-1", "2028-01-15 08:00:00"):
        check_dates(made.sampler, made.sampler.not_after_s)
    check_dates(made.sampler, made.sampler.not_before_s)
    with cannot_start("sampler-1", "2027-01-14 08:00:00"):
        check_dates(made.sampler, made.sampler.not_before_s - 1)


def test_an_encrypted_key_is_an_error_and_not_a_crash(made: MadeRun, tmp_path: Path) -> None:
    save_identity(made.sampler, tmp_path)
    encrypted = new_key().private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"password"),
    )
    write_secret(tmp_path / "key.pem", encrypted)
    with cannot_start(str(tmp_path), "damaged"):
        load_identity(tmp_path)
    with cannot_start("key.pem"):
        load_or_make_key(tmp_path)


def test_the_certificates_an_identity_stands_on_are_named_with_their_ends(made: MadeRun) -> None:
    ends = dict(expiries(made.sampler))
    assert ends["sampler"] == made.sampler.not_after_s
    assert ends["authority"] == pytest.approx(made.made_at_s + AUTHORITY_LIFETIME_S, abs=86400)


@pytest.mark.parametrize("name", ["key.pem", "certificate.pem", "ca.pem"])
def test_no_flipped_bit_of_an_identity_is_loaded(made: MadeRun, tmp_path: Path, name: str) -> None:
    save_identity(made.sampler, tmp_path)
    path = tmp_path / name
    whole, mode = path.read_bytes(), path.stat().st_mode
    der_begins, der_ends = whole.index(b"\n") + 1, whole.rindex(b"\n-----END")
    before = load_identity(tmp_path)
    for at in range(der_begins, der_ends, 7):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 6
        path.write_bytes(damaged)
        path.chmod(mode)
        try:
            loaded = load_identity(tmp_path)
        except StartupError:
            continue
        # What base64 passes over, or a bit that no reader looks at, changes nothing.
        assert loaded is not None
        assert before is not None
        assert is_same_certificate(loaded.certificate_pem, before.certificate_pem)
        assert is_same_certificate(loaded.ca_pem, before.ca_pem)
