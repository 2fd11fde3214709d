"""Whether a peer prompts as the run does."""

from dataclasses import replace

import pytest

from node.coordinator.work.model_check import check_chat_template, check_model
from node.errors import Reason, RefusedError
from support.coordinator import LEARNER


def test_a_peer_with_another_chat_template_is_refused_and_told_what_to_copy() -> None:
    learner = replace(LEARNER, chat_template_digest=b"c" * 16)
    check_chat_template(b"c" * 16, learner)
    for digest in (b"d" * 16, b""):
        with pytest.raises(RefusedError, match=r"copy chat_template\.jinja .* from the learner's") as error:
            check_chat_template(digest, learner)
        assert error.value.reason is Reason.TOKENIZER_MISMATCH


def test_a_learner_of_older_software_says_nothing_of_its_template() -> None:
    check_chat_template(b"c" * 16, LEARNER)


def test_a_peer_with_another_layout_is_told_in_which_numbers_it_differs() -> None:
    learner = replace(LEARNER, layout_summary="layers 30, vocabulary 49152, dtypes bfloat16")
    for summary, said in (
        (
            "layers 24, vocabulary 49152, dtypes float32",
            ": it has layers 24 (the run has layers 30), dtypes float32 (the run has dtypes bfloat16); give",
        ),
        (learner.layout_summary, ": it has tensors of other names or shapes; give"),
        ("", f"is {LEARNER.layout_digest.hex()}; give"),
    ):
        with pytest.raises(RefusedError) as error:
            check_model(b"x" * 16, LEARNER.tokenizer_digest, learner, layout_summary=summary)
        assert error.value.reason is Reason.LAYOUT_MISMATCH
        assert said in str(error.value)
