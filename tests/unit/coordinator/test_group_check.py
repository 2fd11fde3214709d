"""Which groups answer their lease."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from node.coordinator.work.terms.group_check import objection
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import Verdict
from support.coordinator import LEARNER, WORK, Desk, make_answer
from support.groups import SAMPLING, make_completion


@pytest.fixture
def answer() -> RolloutGroup:
    desk = Desk()
    desk.lease()
    return make_answer(desk.accounts, "0.1")


def verdict(group: RolloutGroup) -> Verdict | None:
    desk = Desk()
    desk.lease()
    found = objection(
        group.header,
        desk.accounts.slots.open_slots[0],
        WORK,
        LEARNER,
        lambda version: version == 0,
        is_confirmed=True,
    )
    return found[0] if found else None


def test_a_group_that_answers_its_lease_meets_no_objection(answer: RolloutGroup) -> None:
    assert verdict(answer) is None


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda g: replace(g, layout_digest=b"x" * 16), Verdict.FOREIGN),
        (lambda g: replace(g, tokenizer_digest=b""), Verdict.FOREIGN),
        (lambda g: replace(g, task="other"), Verdict.FOREIGN),
        (lambda g: replace(g, prompt_index=g.prompt_index + 1), Verdict.FOREIGN),
        (lambda g: replace(g, sampling=replace(SAMPLING, temperature=0.5)), Verdict.FOREIGN),
        (lambda g: replace(g, completions=g.completions[:1]), Verdict.MALFORMED),
        (lambda g: replace(g, completions=(make_completion(9), make_completion(2))), Verdict.MALFORMED),
        (lambda g: replace(g, completions=(make_completion(reward=float("nan")),) * 2), Verdict.MALFORMED),
        (lambda g: replace(g, graded_at_s=float("inf")), Verdict.MALFORMED),
    ],
    ids=["layout", "tokenizer", "task", "prompt", "sampling", "size", "length", "nan", "time"],
)
def test_a_group_that_does_not_answer_its_lease_is_refused(
    answer: RolloutGroup, change: Callable[[RolloutGroup], RolloutGroup], expected: Verdict
) -> None:
    assert verdict(change(answer)) is expected
