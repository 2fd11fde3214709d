"""Turns and replies as one completion, worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from node.values.groups.rollout import Completion, Finish
from node.values.groups.well_formed import check_group
from sampler.rollouts.conversation import Conversation
from support.groups import SAMPLING, make_group

END_ID = 1


def drawn(
    *token_ids: int, version: int = 0, finish: Finish = Finish.END, is_truncated: bool = False
) -> Completion:
    n = len(token_ids)
    return Completion(
        token_ids=np.array(token_ids, np.int32),
        behaviour_logprob=np.full(n, -0.5, np.float32),
        policy_version=np.full(n, version, np.int32),
        finish=finish,
        kept_mass=np.full(n, 0.5, np.float32) if is_truncated else None,
    )


def ids(*token_ids: int) -> NDArray[np.int32]:
    return np.array(token_ids, np.int32)


def test_one_turn_is_a_completion_as_it_was_drawn() -> None:
    conversation = Conversation()
    conversation.add_turn(drawn(5, 6, END_ID), "ab")
    completion = conversation.completion(reward=0.25)
    assert completion.is_drawn is None
    assert completion.token_ids.tolist() == [5, 6, END_ID]
    assert (completion.reward, completion.finish, conversation.turns) == (0.25, Finish.END, 1)
    text = conversation.completion_text(has_replies=False)
    assert (text.text, text.tokens, text.finish, tuple(text.conversation)) == ("ab", 3, "end", ())


@pytest.mark.parametrize("is_truncated", [False, True])
def test_replies_lie_between_turns_and_belong_to_the_version_before_them(is_truncated: bool) -> None:
    conversation = Conversation()
    conversation.add_turn(drawn(5, END_ID, version=3, is_truncated=is_truncated), "a")
    assert not conversation.is_over
    assert conversation.add_reply(ids(8, 9), [{"role": "user", "content": "no"}], max_tokens=9) == 5
    conversation.add_turn(drawn(6, version=4, finish=Finish.LENGTH, is_truncated=is_truncated), "b")
    assert conversation.is_over
    assert conversation.turns == 2
    completion = conversation.completion(reward=1.0)
    assert completion.token_ids.tolist() == conversation.token_ids.tolist() == [5, END_ID, 8, 9, 6]
    assert completion.is_drawn is not None
    assert completion.is_drawn.tolist() == [True, True, False, False, True]
    assert completion.policy_version.tolist() == [3, 3, 3, 3, 4]
    assert completion.behaviour_logprob.tolist() == [-0.5, -0.5, 0.0, 0.0, -0.5]
    assert completion.finish is Finish.LENGTH
    if is_truncated:
        assert completion.kept_mass is not None
        assert completion.kept_mass.tolist() == [0.5, 0.5, 1.0, 1.0, 0.5]
        check_group(make_group(completions=(completion,), sampling=replace(SAMPLING, top_k=5)))
    else:
        assert completion.kept_mass is None
        check_group(make_group(completions=(completion,)))
    text = conversation.completion_text(has_replies=True)
    assert (text.text, text.tokens, text.finish) == ("b", 3, "length")
    assert [m["role"] + m["content"] for m in text.conversation] == ["assistanta", "userno", "assistantb"]


@pytest.mark.parametrize(
    ("finish", "reply", "added"),
    [
        (Finish.END, (END_ID, 8), [8]),
        (Finish.END, (8, END_ID), [8, END_ID]),
        (Finish.STOP, (END_ID, 8), [END_ID, 8]),
    ],
)
def test_a_template_does_not_end_a_turn_that_the_policy_has_ended(
    finish: Finish, reply: tuple[int, ...], added: list[int]
) -> None:
    conversation = Conversation()
    conversation.add_turn(drawn(5, END_ID, finish=finish), "a")
    assert conversation.add_reply(ids(*reply), [], max_tokens=9) == 7 - len(added)
    assert conversation.token_ids.tolist() == [5, END_ID, *added]


def test_a_conversation_without_room_for_another_turn_was_cut() -> None:
    conversation = Conversation()
    conversation.add_turn(drawn(5, END_ID), "a")
    assert conversation.add_reply(ids(8), [], max_tokens=3) == 0
    assert conversation.is_over
    assert conversation.completion(reward=0.0).finish is Finish.LENGTH
    assert conversation.completion_text(has_replies=True).finish == "length"
