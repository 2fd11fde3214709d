"""A few prompts of a task, answered by the base model and graded, as a run would; nothing is sent.

prompt --> turns and replies --> grades --> TriedGroup
   '-- fails -----'---------------'-------> TriedGroup with the problem
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from node.errors import RefusedError
from node.rollout import Finish, PromptLease
from sampler.engines.engine import Engine, FinishedRequest, GenerationRequest
from sampler.metrics import SamplerMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.turn_taking import TurnTaking
from sampler.rollouts.work_queue import Job, JobState
from sampler.tasks.grader_process import TaskError


@dataclass(frozen=True, slots=True)
class TriedCompletion:
    """One completion and its grade."""

    text: str
    """Of several turns, with the replies between them."""
    reward: float
    tokens: int
    finish: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TriedGroup:
    """One prompt, and what became of it."""

    prompt_index: int
    prompt_token_ids: tuple[int, ...] = ()
    completions: tuple[TriedCompletion, ...] = ()
    problem: str = ""
    """Why there are no completions; empty: there are."""

    @property
    def teaches(self) -> bool:
        """Whether rewards differ: a group whose completions are worth the same has no advantage."""
        return len({completion.reward for completion in self.completions}) > 1


def summary(groups: Sequence[TriedGroup]) -> dict[str, float]:
    """Return what there is to say of all groups; shares and means are of the groups that were graded."""
    graded = [group for group in groups if not group.problem]
    completions = [completion for group in graded for completion in group.completions]
    counts: dict[str, float] = {"prompts": len(groups), "failed_prompts": len(groups) - len(graded)}
    if not completions:
        return counts
    return counts | {
        "reward_mean": fmean(one.reward for one in completions),
        "teaching_share": fmean(group.teaches for group in graded),
        "cut_share": fmean(one.finish == Finish.LENGTH for one in completions),
        "tokens_mean": fmean(one.tokens for one in completions),
        "tokens_max": max(one.tokens for one in completions),
        "prompt_tokens_max": max(len(group.prompt_token_ids) for group in graded),
    }


class Trial:
    """Answers prompts with an engine that nobody else drives.

    Args:
        done: Called with each group, in the order in which they end.
        stepped: Called after each decode step.
    """

    def __init__(
        self,
        engine: Engine,
        task: RunTask,
        *,
        metrics: SamplerMetrics,
        done: Callable[[TriedGroup], None],
        stepped: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine = engine
        self._task = task
        self._done = done
        self._stepped = stepped
        self._turns = TurnTaking(engine.tokenizer, engine_thread=_Direct(engine), metrics=metrics)

    async def run(self, leases: Sequence[PromptLease]) -> None:
        """Answer and grade the prompts of ``leases``."""
        for lease in leases:
            job = Job(lease, at_s=0.0, state=JobState.GENERATING)
            try:
                job = Job(lease, 0.0, job.state, await self._task.prompt(lease, self._engine.tokenizer))
                self._turns.begin(job)
            except (TaskError, RefusedError) as error:
                self._give_up(job, error)
        while self._engine.running:
            finished = await asyncio.to_thread(self._engine.step)
            self._stepped()
            for request in finished:
                await self._note(request)

    async def _note(self, finished: FinishedRequest) -> None:
        if (spoken := self._turns.note(finished, self._task)) is None:
            return
        group, waiting = spoken
        try:
            for conversation in waiting:
                await self._turns.reply(group, conversation, self._task)
            if self._turns.take_generated(group):
                self._done(await self._graded(group.job, group.conversations))
        except (TaskError, RefusedError) as error:
            self._turns.cancel([group.lease_id])
            self._give_up(group.job, error)

    async def _graded(self, job: Job, conversations: Sequence[Conversation]) -> TriedGroup:
        has_replies = self._task.max_turns > 1
        texts = [conversation.completion_text(has_replies=has_replies) for conversation in conversations]
        grades = await self._task.grade(job, texts)
        return TriedGroup(
            job.lease.prompt_index,
            _tokens(job),
            tuple(
                TriedCompletion(
                    _spoken(conversation),
                    reward,
                    text.tokens,
                    text.finish,
                    {name: values[number] for name, values in grades.metrics.items()},
                )
                for number, (conversation, text, reward) in enumerate(
                    zip(conversations, texts, grades.rewards, strict=True)
                )
            ),
        )

    def _give_up(self, job: Job, error: Exception) -> None:
        self._done(TriedGroup(job.lease.prompt_index, _tokens(job), problem=str(error)))


class _Direct:
    """An engine between two steps, for who has no engine thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def add(self, request: GenerationRequest) -> None:
        self._engine.add(request)

    def cancel(self, request_ids: Sequence[str]) -> None:
        self._engine.cancel(request_ids)


def _tokens(job: Job) -> tuple[int, ...]:
    return () if job.prompt is None else tuple(job.prompt.token_ids.tolist())


def _spoken(conversation: Conversation) -> str:
    messages: Sequence[Mapping[str, Any]] = conversation.messages
    if len(messages) == 1:
        return str(messages[0]["content"])
    return "\n".join(f"[{message['role']}] {message['content']}" for message in messages)
