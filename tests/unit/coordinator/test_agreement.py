"""Who is believed: more samplers than say anything else, and never one alone."""

import pytest

from node.coordinator.work.agreement import (
    PROMPTS,
    SAMPLERS,
    AgreedGrader,
    PromptAgreement,
    PromptSaid,
    agreed_grader,
)


def said(sampler_id: str, digest: bytes, prompt_index: int = 0) -> PromptSaid:
    return PromptSaid(prompt_index, sampler_id, digest)


@pytest.mark.parametrize(
    ("words", "speaker", "is_outvoted"),
    [
        ("", "aX", False),
        ("bY", "aX", False),  # one other's word is not final, whoever came first
        ("bY cY", "aX", True),
        ("bY cY dX", "aX", False),  # as many agree with it
        ("bY cY dX eY", "aX", True),
        ("bY cZ", "aX", False),  # two that disagree with each other
        ("bY bY bY", "aX", False),  # one sampler has one vote
        ("aX aX bY cY", "aX", True),  # its own votes of before do not help it
        ("bY bX cY", "aX", False),  # b has changed its mind
    ],
)
def test_a_sampler_is_outvoted_by_two_others_that_agree_and_are_more(
    words: str, speaker: str, is_outvoted: bool
) -> None:
    agreement = PromptAgreement()
    for word in words.split():
        agreement.add(said(word[0], word[1:].encode()))
    assert agreement.dissent(said(speaker[0], speaker[1:].encode())).is_outvoted == is_outvoted


def test_two_liars_cost_the_first_honest_sampler_a_group_and_no_more() -> None:
    agreement, refused = PromptAgreement(), []
    for sampler_id, digest in (("x", b"lie"), ("y", b"lie"), ("a", b"true"), ("b", b"true"), ("c", b"true")):
        word = said(sampler_id, digest)
        if agreement.dissent(word).is_outvoted:
            refused.append(sampler_id)
        agreement.add(word)
    assert refused == ["a"]
    assert agreement.dissent(said("x", b"lie")).is_outvoted
    agreement.forget(frozenset({"a"}))
    agreement.forget(frozenset({"b"}))
    assert not agreement.dissent(said("x", b"lie")).is_outvoted


def test_what_is_remembered_is_bounded_in_prompts_and_in_samplers() -> None:
    agreement = PromptAgreement()
    for sampler in range(3 * SAMPLERS):
        agreement.add(said(f"s{sampler}", b"Y"))
    assert len(agreement.dissent(said("a", b"X")).others) == SAMPLERS
    for prompt_index in range(1, PROMPTS + 1):
        agreement.add(said("b", b"Y", prompt_index))
    assert agreement.dissent(said("a", b"X")).others == ()
    assert agreement.dissent(said("a", b"X", PROMPTS)).others == ("b",)


A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def agreed(
    claims: dict[str, bytes],
    *,
    before: bytes = b"",
    configured: bytes = b"",
    verifiers: dict[str, bytes] | None = None,
) -> bytes:
    return agreed_grader(
        AgreedGrader(before), claims, configured=configured, verifiers=verifiers or {}
    ).digest


def test_what_most_samplers_say_is_the_runs_grader() -> None:
    assert agreed({}) == b""
    assert agreed({"1": A}) == A
    assert agreed({"1": A, "2": B, "3": B}, before=A) == B


def test_one_sampler_does_not_overrule_what_was_agreed_before_it_came() -> None:
    assert agreed({"1": A, "2": B}, before=A) == A
    assert agreed({"1": A, "2": B}, before=B) == B
    assert agreed({}, before=A) == A


def test_what_is_configured_is_not_put_to_a_vote() -> None:
    assert agreed({"1": A, "2": A}, configured=C) == C
    assert agreed({"1": A, "2": A}, configured=C, verifiers={"v": B}) == C


def test_a_verifier_is_not_outvoted_by_any_number_of_samplers() -> None:
    assert agreed({"1": A, "2": A, "3": B}, before=A, verifiers={"v": B}) == B
    assert agreed({"1": A, "2": A}, before=A, verifiers={"v": B, "w": C, "x": C}) == C


def test_another_grader_is_refused_with_both_digests_and_who_said_the_runs() -> None:
    agreed_on = agreed_grader(AgreedGrader(), {"1": A, "2": A, "3": B}, configured=b"", verifiers={})
    assert agreed_on.objection(A) == ""
    assert agreed_on.objection(B) == (
        f"grader code {B.hex()} is not the run's {A.hex()}, as 2 of 3 samplers said"
    )
    assert AgreedGrader().objection(B) == ""
