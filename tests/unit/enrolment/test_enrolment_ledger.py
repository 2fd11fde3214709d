import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from node.enrolment import enrolment_ledger
from node.enrolment.authority import Authority
from node.enrolment.enrolment_ledger import EnrolmentLedger
from node.enrolment.tokens import DEFAULT_LIFETIME_S, Token, issue_token
from node.errors import Reason, RefusedError
from node.values.roles import Role
from support.identity import NOW_S

AUTHORITY = Authority.create("run", now=NOW_S)
KEY, OTHER_KEY = b"k" * 32, b"o" * 32


@contextlib.contextmanager
def opened(tmp_path: Path) -> Iterator[EnrolmentLedger]:
    with contextlib.closing(EnrolmentLedger(tmp_path / "enrolments.sqlite")) as ledger:
        yield ledger


def make_token(node_id: str | None = None, *, uses: int = 1) -> Token:
    text = issue_token(AUTHORITY, role=Role.SAMPLER, node_id=node_id, address="hub:1", now=NOW_S, uses=uses)
    return Token.parse(text)


def refusal(ledger: EnrolmentLedger, token: Token, node_id: str, key: bytes = KEY) -> str:
    with pytest.raises(RefusedError) as refused:
        ledger.spend(token, node_id=node_id, key_digest=key, now=NOW_S)
    assert refused.value.reason is Reason.TOKEN_REFUSED
    return str(refused.value)


def test_a_token_is_spent_by_the_first_and_good_for_nobody_else_even_after_a_restart(tmp_path: Path) -> None:
    token = make_token()
    with opened(tmp_path) as ledger:
        ledger.spend(token, node_id="s1", key_digest=KEY, now=NOW_S)
        assert "used before" in refusal(ledger, token, "s2")
        assert "used before" in refusal(ledger, token, "s1", OTHER_KEY)
    with opened(tmp_path) as ledger:
        assert "used before" in refusal(ledger, token, "s2")


def test_the_peer_that_spent_a_token_may_show_it_again(tmp_path: Path) -> None:
    token = make_token()
    for _ in range(2):
        with opened(tmp_path) as ledger:
            ledger.spend(token, node_id="s1", key_digest=KEY, now=NOW_S)


def test_a_taken_name_is_given_again_only_by_a_token_that_says_it(tmp_path: Path) -> None:
    with opened(tmp_path) as ledger:
        ledger.spend(make_token(), node_id="s1", key_digest=KEY, now=NOW_S)
        assert "there is a node s1" in refusal(ledger, make_token(), "s1", OTHER_KEY)
        ledger.spend(make_token("s1"), node_id="s1", key_digest=OTHER_KEY, now=NOW_S)


@pytest.mark.parametrize("name", ["coordinator", "learner", "operator"])
def test_the_names_that_init_gave_are_taken_from_the_start(tmp_path: Path, name: str) -> None:
    with opened(tmp_path) as ledger:
        assert f"there is a node {name}" in refusal(ledger, make_token(), name)


def test_a_refused_token_is_not_spent(tmp_path: Path) -> None:
    token = make_token()
    with opened(tmp_path) as ledger:
        refusal(ledger, token, "learner")
        ledger.spend(token, node_id="s1", key_digest=KEY, now=NOW_S)


def test_a_spent_token_stays_spent_after_a_clock_that_was_ahead_has_come_back(tmp_path: Path) -> None:
    first = make_token()
    with opened(tmp_path) as ledger:
        ledger.spend(first, node_id="s1", key_digest=KEY, now=NOW_S)
        # A minute in which the clock is 400 days ahead, and a token that was made in it.
        ahead_s = NOW_S + 400 * 86400
        late = make_token().model_copy(update={"expires_at_s": ahead_s + 3600})
        ledger.spend(late, node_id="s2", key_digest=KEY, now=ahead_s)
        assert "used before" in refusal(ledger, first, "s3")


def test_expired_tokens_are_forgotten_oldest_first_when_there_are_many(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(enrolment_ledger, "REMEMBERED_TOKENS", 3)
    tokens = [make_token() for _ in range(5)]
    with opened(tmp_path) as ledger:
        for number, token in enumerate(tokens):
            ledger.spend(token, node_id=f"s{number}", key_digest=KEY, now=NOW_S)
        assert _spent(tmp_path) == 5  # none has expired
        late = make_token().model_copy(update={"expires_at_s": NOW_S + 2 * DEFAULT_LIFETIME_S})
        ledger.spend(late, node_id="s9", key_digest=KEY, now=NOW_S + DEFAULT_LIFETIME_S)
        assert _spent(tmp_path) == 3 + 1
        assert "used before" in refusal(ledger, tokens[-1], "s10")


def _spent(tmp_path: Path) -> int:
    with contextlib.closing(sqlite3.connect(tmp_path / "enrolments.sqlite")) as database:
        [(count,)] = database.execute("SELECT count(*) FROM uses").fetchall()
        return int(count)


def test_a_token_with_a_count_lets_in_as_many_peers_and_no_more(tmp_path: Path) -> None:
    token = make_token(uses=2)
    with opened(tmp_path) as ledger:
        for _ in range(2):  # the second time as after a lost answer
            ledger.spend(token, node_id="s1", key_digest=b"1", now=NOW_S)
        ledger.spend(token, node_id="s2", key_digest=b"2", now=NOW_S)
        assert "used before, by 2 peers" in refusal(ledger, token, "s3")
        assert "used before" in refusal(ledger, token, "s9", b"1")  # one key is one peer
        ledger.note_issued(token)
        [listed] = ledger.issued()
    assert (listed.number, listed.uses, listed.used_by) == (token.number, 2, ("s1", "s2"))


def test_a_cancelled_token_lets_nobody_else_in_and_the_peer_it_let_in_stays(tmp_path: Path) -> None:
    token, other = make_token(uses=2), make_token()
    with opened(tmp_path) as operator, opened(tmp_path) as coordinator:
        for made in (token, other):
            operator.note_issued(made)
        coordinator.spend(token, node_id="s1", key_digest=b"1", now=NOW_S)
        assert operator.cancel(token.number)
        assert not operator.cancel("0" * 12)
        assert "was cancelled" in refusal(coordinator, token, "s2")
        coordinator.spend(token, node_id="s1", key_digest=b"1", now=NOW_S)
        coordinator.spend(other, node_id="s2", key_digest=b"2", now=NOW_S)
        assert [one.is_cancelled for one in coordinator.issued()] == [True, False]


def test_tokens_spent_before_tokens_had_counts_stay_spent(tmp_path: Path) -> None:
    token = make_token()
    with contextlib.closing(sqlite3.connect(tmp_path / "enrolments.sqlite")) as database, database:
        database.execute(
            "CREATE TABLE spent (nonce TEXT PRIMARY KEY, expires_at_s REAL NOT NULL, node_id TEXT NOT NULL, "
            "key_digest BLOB NOT NULL) STRICT"
        )
        database.execute("INSERT INTO spent VALUES (?, ?, 's1', ?)", (token.nonce, token.expires_at_s, KEY))
    with opened(tmp_path) as ledger:
        assert "used before" in refusal(ledger, token, "s2", OTHER_KEY)
        ledger.spend(token, node_id="s1", key_digest=KEY, now=NOW_S)
