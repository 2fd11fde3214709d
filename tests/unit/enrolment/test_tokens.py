import base64
import datetime
import json

import jwt
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec, ed25519
from cryptography.hazmat.primitives.serialization import Encoding

from node.enrolment.authority import Authority
from node.enrolment.tokens import DEFAULT_LIFETIME_S, TYPE, Token, issue_token, redeem
from node.errors import Reason, RefusedError
from node.identity.certificates import read_certificate
from node.system.clock import moment
from node.values.limits import TOKEN_BYTES
from node.values.roles import Role
from support.identity import NOW_S
from support.refusals import naming

AUTHORITY = Authority.create("run", now=NOW_S)


def make_token(
    authority: Authority = AUTHORITY, *, role: Role = Role.SAMPLER, node_id: str | None = None
) -> str:
    return issue_token(authority, role=role, node_id=node_id, address="hub.example.org:7401", now=NOW_S)


def refusal(text: str, *, node_id: str = "s1", now: float = NOW_S) -> str:
    with pytest.raises(RefusedError) as refused:
        redeem(text, authority=AUTHORITY, node_id=node_id, now=now)
    assert refused.value.reason is Reason.TOKEN_REFUSED
    return str(refused.value)


def encoded(header: dict[str, object]) -> str:
    return base64.urlsafe_b64encode(json.dumps(header).encode()).rstrip(b"=").decode()


def test_a_token_is_one_short_line_and_says_all_its_holder_needs() -> None:
    text = make_token(node_id="s1")
    assert jwt.get_unverified_header(text) == {"alg": "ES256", "typ": "heterorl-token+jwt"}
    assert text.isascii()
    assert text.split() == [text]
    assert len(text) <= TOKEN_BYTES // 2
    token = Token.parse(text)
    assert (token.run_id, token.role, token.node_id) == ("run", Role.SAMPLER, "s1")
    assert token.address == "hub.example.org:7401"
    assert token.expires_at_s == NOW_S + DEFAULT_LIFETIME_S
    assert token.ca_certificate_pem.encode() == AUTHORITY.certificate_pem


def test_a_token_admits_the_role_and_node_it_was_made_for() -> None:
    assert redeem(make_token(), authority=AUTHORITY, node_id="any", now=NOW_S).role is Role.SAMPLER
    assert redeem(make_token(node_id="s1"), authority=AUTHORITY, node_id="s1", now=NOW_S).node_id == "s1"
    assert "for node s1, not s2" in refusal(make_token(node_id="s1"), node_id="s2")


def test_a_token_lives_to_the_second_it_says() -> None:
    text = make_token()
    redeem(text, authority=AUTHORITY, node_id="s1", now=NOW_S + DEFAULT_LIFETIME_S - 1)
    refused = refusal(text, now=NOW_S + DEFAULT_LIFETIME_S)
    assert f"expired 0 s ago, at {moment(NOW_S + DEFAULT_LIFETIME_S)}" in refused
    assert (
        "ask the operator for a new token; one that lasts longer, at most 7d, is made with --ttl" in refused
    )


def test_a_token_of_another_authority_is_refused_also_for_a_run_of_the_same_name() -> None:
    twin = Authority.create("run", now=NOW_S)
    assert "another authority" in refusal(make_token(twin))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "e30",
        "..",
        "e30.e30.e30",
        "e30.e30",
        "e30.é.é",
        "e30.=.=",
        "\ud800.e30.e30",
        "a" * 5000,
        "bnVsbA.bnVsbA.AA",
        f"{encoded({'alg': 'none', 'typ': TYPE})}.e30.",
        f"{encoded({'alg': 'ES256', 'typ': TYPE, 'b64': False, 'crit': ['b64']})}..AA",
    ],
)
def test_nonsense_is_no_token(text: str) -> None:
    assert "not a token" in refusal(text)


def claims(**changes: object) -> bytes:
    _, payload, _ = make_token().split(".")
    return json.dumps(json.loads(base64.urlsafe_b64decode(payload + "==")) | changes).encode()


def test_any_tool_for_json_web_tokens_reads_what_a_token_says() -> None:
    key = read_certificate(AUTHORITY.certificate_pem).public_key()
    assert isinstance(key, ec.EllipticCurvePublicKey)
    said = jwt.decode(make_token(node_id="s1"), key, algorithms=["ES256"], options={"verify_exp": False})
    assert (said["iss"], said["sub"], said["role"], said["exp"]) == (
        "run",
        "s1",
        "sampler",
        NOW_S + DEFAULT_LIFETIME_S,
    )


def test_what_the_authority_signs_for_another_purpose_is_no_token() -> None:
    assert Token.parse(AUTHORITY.sign_token(claims(), typ=TYPE)).run_id == "run"
    assert "not a token" in refusal(AUTHORITY.sign_token(claims(), typ="JWT"))
    assert "another version" in refusal(AUTHORITY.sign_token(claims(iss=7), typ=TYPE))
    assert "another version" in refusal(AUTHORITY.sign_token(claims(run_id="run"), typ=TYPE))


def test_a_token_under_another_algorithm_or_kind_of_key_is_no_token() -> None:
    symmetric = jwt.PyJWS().encode(claims(), b"k" * 32, "HS256", headers={"typ": TYPE})
    assert "not a token" in refusal(symmetric)
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([])
    moment = datetime.datetime.fromtimestamp(NOW_S, datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, moment, moment).sign(key, None)
    ).public_bytes(Encoding.PEM)
    signed = jwt.PyJWS().encode(
        claims(ca_certificate_pem=certificate.decode()), key, "EdDSA", headers={"typ": TYPE}
    )
    assert "not a token" in refusal(signed)
    header = make_token().split(".")[0]
    assert "not a token" in refusal(".".join((header, *signed.split(".")[1:])))


@pytest.mark.parametrize("claims", [{"shard": 1}, {"address": None}])
def test_a_token_with_other_claims_is_of_another_version_and_not_damaged(claims: dict[str, object]) -> None:
    _, payload, _ = make_token().split(".")
    said = json.loads(base64.urlsafe_b64decode(payload + "=="))
    changed = {name: value for name, value in (said | claims).items() if value is not None}
    text = AUTHORITY.sign_token(json.dumps(changed).encode(), typ=TYPE)
    assert "made by another version of heterorl-node" in refusal(text)
    assert "damaged" in refusal(text[:-3])


def test_no_token_makes_a_coordinator() -> None:
    with naming(ValueError, "coordinator"):
        make_token(role=Role.COORDINATOR)
