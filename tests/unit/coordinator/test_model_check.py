"""Whether a peer prompts as the run does."""

from dataclasses import replace

from node.coordinator.work.balance import Balance
from node.coordinator.work.decisions import leasing
from node.coordinator.work.decisions.leasing import LeaseRequest
from node.coordinator.work.terms.model_check import (
    StatedText,
    VerifierModel,
    check_base,
    check_chat_template,
    check_model,
)
from node.errors import Reason
from node.values.policy import PolicyVersion
from node.weights.format.layout import Layout, TensorSpec
from support.coordinator import LEARNER, Desk, make_accounts
from support.refusals import refused


def test_a_peer_with_another_chat_template_is_refused_and_told_what_to_copy() -> None:
    learner = replace(LEARNER, chat_template_digest=b"c" * 16)
    check_chat_template(b"c" * 16, learner)
    for digest in (b"d" * 16, b""):
        with refused(Reason.TOKENIZER_MISMATCH, "chat_template.jinja"):
            check_chat_template(digest, learner)


def test_a_learner_of_older_software_says_nothing_of_its_template() -> None:
    check_chat_template(b"c" * 16, LEARNER)


def test_a_peer_that_reads_texts_otherwise_is_told_in_what() -> None:
    learner = replace(LEARNER, text_digest=b"r" * 16, text_summary="end tokens\t[2,4]\ntokenizer.json\t1")
    same = learner.text
    same.check(learner)
    other = replace(same, text_digest=b"o" * 16, text_summary="added\t1\nend tokens\t[2]\ntokenizer.json\t1")
    with refused(Reason.TOKENIZER_MISMATCH, "added is 1", "end tokens is [2]", "[2,4]", "generation_config"):
        other.check(learner)
    with refused(Reason.TOKENIZER_MISMATCH):
        replace(other, text_summary="").check(learner)


def test_only_a_verifier_must_say_how_it_reads_texts_where_the_learner_does() -> None:
    learner = replace(LEARNER, text_digest=b"r" * 16)
    silent = StatedText(LEARNER.tokenizer_digest)
    silent.check(learner)
    VerifierModel(silent).check(LEARNER)
    VerifierModel(replace(silent, text_digest=b"o" * 16)).check(LEARNER)
    with refused(Reason.TOKENIZER_MISMATCH, "verifier"):
        VerifierModel(silent).check(learner)


LAYOUT = Layout.of([TensorSpec(name, (4, 8)) for name in ("embed", "head", "norm")], frame_words=16)
BASE = LAYOUT.base_model(range(6))
KNOWN = replace(LEARNER, base_root=BASE.root, base_parts=BASE.parts)


def test_a_base_of_other_words_is_refused_and_told_in_what_it_differs() -> None:
    check_base(BASE, KNOWN)
    fine_tuned = LAYOUT.base_model([0, 1, 7, 3, 4, 8])
    names = (fine_tuned.root.hex(), BASE.root.hex(), "2 of 6", "head, norm", "model_dir", "this peer")
    with refused(Reason.BASE_MISMATCH, *names):
        check_base(fine_tuned, KNOWN)


def test_nothing_is_leased_for_another_version_0_however_early_its_sampler_joined() -> None:
    desk = Desk(make_accounts(Balance(facts=(KNOWN,))))
    desk.accounts.confirm()

    def lease(held: PolicyVersion) -> int:
        decision = leasing.lease(desk.accounts, LeaseRequest("s1", 1, held), now=desk.now)
        return len(decision.answer.leases)

    for root in (b"r" * 16, b""):
        with refused(Reason.BASE_MISMATCH, BASE.root.hex()):
            lease(PolicyVersion(0, root))
    assert lease(PolicyVersion(0, BASE.root)) == 1


def test_a_base_larger_than_64_frames_is_told_in_64_parts() -> None:
    layout = Layout.of([TensorSpec("a", (1000, 10))], frame_words=16)
    digests = list(range(len(layout.frames)))
    base = layout.base_model(digests)
    assert (len(base.parts), len(base.part_names)) == (64 * 8, 64)
    digests[-1] = 0
    other = layout.base_model(digests)
    assert other.parts[:-8] == base.parts[:-8]
    assert other.parts[-8:] != base.parts[-8:]


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
        with refused(Reason.LAYOUT_MISMATCH, said):
            check_model(b"x" * 16, LEARNER.tokenizer_digest, learner, layout_summary=summary)
