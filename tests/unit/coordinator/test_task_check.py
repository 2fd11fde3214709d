"""The operator's word on the task counts, and nobody else's."""

import pytest

from node.coordinator.work.terms.model_check import check_prompts
from node.coordinator.work.terms.run_terms import UNSAID, RunGrader, run_grader
from node.errors import Reason, RefusedError

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


def test_a_sampler_that_found_another_number_of_prompts_is_told_both() -> None:
    check_prompts(100, runs=100, task="t", sampler_id="s2")
    with pytest.raises(RefusedError) as error:
        check_prompts(90, runs=100, task="t", sampler_id="s2")
    assert error.value.reason is Reason.TASK_MISMATCH
    for part in ("'t'", "s2", " 90 ", " 100"):
        assert part in error.value.what
    assert "coordinator.prompts = 90" in error.value.fix
