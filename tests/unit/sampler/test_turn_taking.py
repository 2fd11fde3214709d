"""Which turns are generated, and what is left of a group that is dropped; a task without a process."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from node.values.groups.failure import Failure
from node.values.groups.rollout import Completion, Finish, PromptLease
from sampler.engines.engine import GenerationRequest, Tokenizer
from sampler.engines.engine_thread import EngineThread
from sampler.metrics import SamplerMetrics
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.turn_taking import TurnTaking, split_request_id
from sampler.rollouts.work_queue import Job, JobState
from sampler.tasks.processes.grader_pool import GraderPool
from sampler.tasks.processes.grader_requests import TaskDescription, TaskError
from support.graded_texts import prompt_of
from support.groups import SAMPLING
from support.present import present

END_ID = 1
PROMPT = np.array([63], np.int32)


class Codec:
    """Tokens are characters."""

    def decode(self, token_ids: NDArray[np.int32]) -> str:
        return "".join(chr(i) for i in token_ids if i != END_ID)

    def encode_reply(self, reply: str, arguments: Mapping[str, Any]) -> NDArray[np.int32]:
        return np.array([ord(character) for character in reply], np.int32)


class Thread:
    """Takes requests down."""

    def __init__(self) -> None:
        self.added: list[GenerationRequest] = []
        self.cancelled: list[str] = []

    def add(self, request: GenerationRequest) -> None:
        self.added.append(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self.cancelled += request_ids


class Replies:
    """Says ``reply``; calls ``meanwhile`` first."""

    def __init__(self) -> None:
        self.reply_text: str | None = "no"
        self.error: TaskError | None = None
        self.meanwhile: Any = lambda: None

    async def reply(self, *_: Any) -> str | None:
        self.meanwhile()
        if self.error is not None:
            raise self.error
        return self.reply_text


class Table:
    """A sampler's turns with all that they need."""

    def __init__(self, *, max_turns: int = 3) -> None:
        self.thread, self.replies = Thread(), Replies()
        self.turns = TurnTaking(
            cast(Tokenizer, Codec()),
            engine_thread=cast(EngineThread, self.thread),
            metrics=SamplerMetrics(CollectorRegistry()),
        )
        description = TaskDescription(prompts=10, max_turns=max_turns)
        self.task = RunTask("t", b"", 10, description, {}, cast(GraderPool, self.replies))

    def begin(self, lease_id: str = "0.1", *, max_new_tokens: int = 8) -> None:
        sampling = replace(SAMPLING, max_new_tokens=max_new_tokens)
        prompt = replace(prompt_of(0), token_ids=PROMPT)
        lease = PromptLease(lease_id, "t", 0, 2, sampling, 60.0)
        self.turns.begin(Job(lease, 0.0, JobState.GENERATING, prompt))

    def drawn(self, request_id: str, *texts: str, finish: Finish = Finish.END) -> Job | None:
        """Hand in turns; return the group."""
        completions = tuple(sampled(text, finish) for text in texts)
        request = GenerationRequest(request_id, PROMPT, len(texts), SAMPLING, completions)
        noted = self.turns.note(request, self.task)
        return None if noted is None else noted[0]


def sampled(text: str, finish: Finish) -> Completion:
    ids = np.array([*map(ord, text), END_ID], np.int32)
    n = len(ids)
    return Completion(ids, np.full(n, -0.5, np.float32), np.zeros(n, np.int32), finish, None)


async def test_completions_go_on_independently_until_all_are_over() -> None:
    table = Table()
    table.begin()
    group = present(table.drawn("0.1", "a", "b"))
    first, second = group.conversations
    await table.turns.reply(group, first, table.task)
    (request,) = table.thread.added[1:]
    assert split_request_id(request.request_id) == ("0.1", 0)
    assert request.prompt_token_ids.tolist() == [*b"?a\x01no"]
    assert (request.wanted, request.sampling.max_new_tokens) == (1, 8 - 4)
    table.drawn(request.request_id, "c", finish=Finish.LENGTH)
    assert first.is_over
    assert not table.turns.take_generated(group)
    table.replies.reply_text = None
    await table.turns.reply(group, second, table.task)
    assert table.turns.take_generated(group)
    assert not table.turns.take_generated(group)
    assert [c.completion(reward=0.0).token_ids.tolist() for c in group.conversations] == [
        [*b"a\x01noc\x01"],
        [*b"b\x01"],
    ]


async def test_the_last_turn_and_the_one_after_which_there_is_no_room_get_no_other() -> None:
    table = Table(max_turns=1)
    table.begin()
    group = present(table.drawn("0.1", "a", "b"))
    assert table.turns.take_generated(group)
    assert {c.finish for c in group.conversations} == {Finish.END}
    table = Table()
    table.begin(max_new_tokens=4)
    group = present(table.drawn("0.1", "a", "b", finish=Finish.STOP))
    for conversation in group.conversations:
        await table.turns.reply(group, conversation, table.task)
    assert len(table.thread.added) == 1
    assert {c.completion(reward=0.0).finish for c in group.conversations} == {Finish.LENGTH}
    assert table.turns.take_generated(group)


@pytest.mark.parametrize("is_failing", [False, True])
@pytest.mark.parametrize("is_leased_again", [False, True])
async def test_a_group_that_is_dropped_is_gone_with_all_that_it_waits_for(
    is_failing: bool, is_leased_again: bool
) -> None:
    table = Table()
    table.begin()
    group = present(table.drawn("0.1", "a", "b"))

    def drop() -> None:
        table.turns.cancel(["0.1", "7.1"])
        if is_leased_again:
            table.begin()

    table.replies.meanwhile = drop
    if is_failing:
        table.replies.error = TaskError("late", fault=Failure.GRADING_FAILED)
    await table.turns.reply(group, group.conversations[0], table.task)
    assert table.thread.cancelled == ["0.1", "0.1/0", "0.1/1"]
    assert len(table.thread.added) == 1 + is_leased_again
    assert not table.turns.take_generated(group)
    assert table.drawn("0.1/1", "late") is None


async def test_a_reply_that_fails_is_the_callers_to_answer_for() -> None:
    table = Table()
    table.begin()
    group = present(table.drawn("0.1", "a", "b"))
    table.replies.error = TaskError("no words", fault=Failure.GRADING_FAILED)
    with pytest.raises(TaskError, match="no words"):
        await table.turns.reply(group, group.conversations[1], table.task)
