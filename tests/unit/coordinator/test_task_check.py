"""The operator's word on the task counts, and nobody else's."""

import pytest

from node.coordinator.work.terms.run_terms import UNSAID, RunGrader, run_grader

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


@pytest.mark.parametrize(
    ("before", "verifiers", "digest", "said_by"),
    [
        (b"", {}, b"", ""),
        (A, {}, A, "before"),  # while none is here, what one said holds
        (b"", {"v": B}, B, "verifier v"),
        (A, {"v": B}, B, "verifier v"),
        (b"", {"v": B, "w": C}, B, "verifier v"),
        (C, {"v": B, "w": C}, C, "verifier w"),  # the first upgraded one does not change it
        (C, {"v": B, "w": B}, B, "verifier v"),
    ],
)
def test_a_verifier_says_which_code_grades(
    before: bytes, verifiers: dict[str, bytes], digest: bytes, said_by: str
) -> None:
    known = RunGrader(before, "before") if before else UNSAID
    assert run_grader(known, configured=b"", verifiers=verifiers) == RunGrader(digest, said_by)


@pytest.mark.parametrize("verifiers", [{}, {"v": B, "w": B}])
def test_the_configured_code_is_above_every_verifier(verifiers: dict[str, bytes]) -> None:
    found = run_grader(RunGrader(B, "verifier v"), configured=A, verifiers=verifiers)
    assert found == RunGrader(A, "the coordinator's configuration")


def test_other_code_is_refused_with_both_digests_and_none_is_where_nobody_has_said_which() -> None:
    runs = RunGrader(A, "verifier v")
    assert runs.objection(A) == ""
    for part in (A.hex(), B.hex(), "verifier v"):
        assert part in runs.objection(B)
    assert "without a digest" in runs.objection(b"")
    assert UNSAID.objection(B) == ""
