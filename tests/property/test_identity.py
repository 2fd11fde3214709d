"""Whatever a stranger sends, the answer is a refusal and never a surprise."""

import json

import pytest
from cryptography.x509 import load_der_x509_csr
from hypothesis import given
from hypothesis import strategies as st

from node.enrolment.authority import Authority, read_signing_request, signing_request
from node.enrolment.tokens import TYPE, Token, issue_token
from node.errors import RefusedError
from node.identity.certificates import new_key
from node.identity.peer import Peer, is_name
from node.identity.signatures import SigningKey, verify
from node.values.roles import Role
from support.identity import NOW_S

AUTHORITY = Authority.create("run", now=NOW_S)
TOKEN = issue_token(AUTHORITY, role=Role.SAMPLER, node_id=None, address="hub:1", now=NOW_S)
REQUEST = signing_request(new_key())
KEY = SigningKey.generate()
CLAIMS = {"iss", "sub", "role", "exp", "jti", "address", "ca_certificate_pem"}

names = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?", fullmatch=True)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3),
)


@given(names, st.sampled_from(Role), names)
def test_every_peer_is_read_back_from_its_name(run_id: str, role: Role, node_id: str) -> None:
    peer = Peer(run_id, role, node_id)
    assert Peer.from_spiffe_id(peer.spiffe_id) == peer


@given(st.text() | st.text(alphabet="spife:/runmlc-\n", max_size=40).map(lambda text: f"spiffe://{text}"))
def test_a_text_names_a_peer_exactly_or_nobody(text: str) -> None:
    try:
        peer = Peer.from_spiffe_id(text)
    except RefusedError:
        return
    assert peer.spiffe_id == text
    assert is_name(peer.run_id)
    assert is_name(peer.node_id)


@given(st.text() | st.from_regex(r"(e30)(\.[A-Za-z0-9_-]{0,40}){2}", fullmatch=True))
def test_a_text_that_is_no_token_is_refused(text: str) -> None:
    with pytest.raises(RefusedError):
        Token.parse(text)


@given(
    st.dictionaries(st.sampled_from([*sorted(CLAIMS), "other"]), json_values),
    st.booleans(),
)
def test_what_any_json_under_the_run_domain_says_is_refused(values: dict[str, object], has_ca: bool) -> None:
    # An attacker can sign with an authority of its own; what it signs must still be a token.
    if has_ca:
        values["ca_certificate_pem"] = AUTHORITY.certificate_pem.decode()
    try:
        token = Token.parse(AUTHORITY.sign_token(json.dumps(values).encode(), typ=TYPE))
    except RefusedError:
        return
    assert CLAIMS - {"sub"} <= set(values) <= CLAIMS
    assert is_name(token.run_id)


@given(st.data())
def test_a_token_with_any_character_changed_is_refused(data: st.DataObject) -> None:
    position = data.draw(st.integers(0, len(TOKEN) - 1))
    character = data.draw(st.characters(max_codepoint=0x7F, exclude_characters=TOKEN[position]))
    changed = TOKEN[:position] + character + TOKEN[position + 1 :]
    if changed.strip() == TOKEN:
        return
    with pytest.raises(RefusedError):
        Token.parse(changed)


@given(st.binary(max_size=300), st.integers(0, len(REQUEST) - 1), st.integers(1, 255))
def test_a_damaged_signing_request_is_refused(noise: bytes, position: int, flip: int) -> None:
    with pytest.raises(RefusedError):
        read_signing_request(noise)
    damaged = bytearray(REQUEST)
    damaged[position] ^= flip
    with pytest.raises(RefusedError):
        read_signing_request(bytes(damaged))


def test_a_signing_request_can_be_written_in_one_way_only() -> None:
    """Half of all signatures end in a bit that is 0, and parse as well when it is said to be unused."""
    request = next(der for der in iter(lambda: signing_request(new_key()), b"") if not der[-1] & 1)
    signature = load_der_x509_csr(request).signature
    unused_bits = len(request) - len(signature) - 1
    assert request[unused_bits] == 0
    with pytest.raises(RefusedError):
        read_signing_request(request[:unused_bits] + b"\1" + signature)


@given(st.binary(), st.binary(), st.binary(max_size=70))
def test_no_signature_passes_for_another_message(message: bytes, other: bytes, noise: bytes) -> None:
    domain = b"test-v1\0"
    signature = KEY.sign(domain, message)
    verify(KEY.public_key, domain, message, signature)
    if other != message:
        with pytest.raises(RefusedError):
            verify(KEY.public_key, domain, other, signature)
    with pytest.raises(RefusedError):
        verify(KEY.public_key, domain, message, noise)
