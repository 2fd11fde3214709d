"""Who is believed of a prompt's tokens: more samplers than say anything else, and never one alone."""

import pytest

from node.coordinator.work.prompt_agreement import PROMPTS, SAMPLERS, PromptAgreement, PromptSaid


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
