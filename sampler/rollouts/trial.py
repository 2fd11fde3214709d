"""A task's prompts, answered by an engine that nobody else drives, and graded: for `heterorl-node try`."""

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from node.errors import RefusedError
from node.grading.jsonl_options import JsonlOptions
from node.questions.answer_part import answer_part
from node.questions.data_row import RowError
from node.tasks.task_options import PromptOptions, TaskOptions
from node.values.groups.rollout import Finish, PromptLease
from sampler.engines.engine import Engine, GenerationRequest
from sampler.metrics import SamplerMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.run_task import RunTask
from sampler.rollouts.turn_taking import TurnTaking
from sampler.rollouts.work_queue import Job, JobState
from sampler.tasks.processes.grader_requests import TaskError
from sampler.tasks.task import CompletionText


@dataclass(frozen=True, slots=True)
class TriedGroup:
    """One prompt, and what became of it."""

    prompt_index: int
    prompt_token_ids: tuple[int, ...] = ()
    completions: tuple[dict[str, Any], ...] = ()
    """Text (of several turns, with the replies between them), reward, tokens, finish and metrics of each; and
    of a task that asks a question ``graded``, the part that was graded, and ``compared``, the number or
    formula in it; or ``no_answer``, why there is none."""
    right_answers: tuple[str, ...] = ()
    """Answers of its row, any of which is right; empty: the grader compares with none."""
    problem: str = ""
    """Why there are no completions; empty: there are."""

    @property
    def teaches(self) -> bool:
        """Whether rewards differ: a group whose completions are worth the same has no advantage."""
        return len(set(self.rewards)) > 1

    @property
    def rewards(self) -> list[float]:
        """Rewards of the completions that have one; the grader abstained from the others."""
        return [one["reward"] for one in self.completions if one["reward"] is not None]


def summary(groups: Sequence[TriedGroup]) -> dict[str, Any]:
    """Return what there is to say of all groups; shares and means are of the groups that were graded."""
    graded = [group for group in groups if not group.problem]
    completions = [completion for group in graded for completion in group.completions]
    counts: dict[str, Any] = {"prompts": len(groups), "failed_prompts": len(groups) - len(graded)}
    if not completions:
        return counts
    return counts | {
        "reward_mean": fmean(reward for group in graded for reward in group.rewards),
        "teaching_share": fmean(group.teaches for group in graded),
        "cut_share": fmean(one["finish"] == Finish.LENGTH for one in completions),
        "tokens_mean": fmean(one["tokens"] for one in completions),
        "tokens_max": max(one["tokens"] for one in completions),
        "prompt_tokens_max": max(len(group.prompt_token_ids) for group in graded),
    }


class Trial:
    """Answers and grades prompts with an engine that nobody else drives; ``done`` is called with each group.

    prompt --> turns and replies --> grades --> TriedGroup
       '-- fails -----'---------------'-------> TriedGroup with the problem
    """

    def __init__(
        self,
        engine: Engine,
        task: RunTask,
        *,
        options: TaskOptions | None,
        metrics: SamplerMetrics,
        done: Callable[[TriedGroup], None],
    ) -> None:
        self._engine = engine
        self._task = task
        self._options = options
        self._done = done
        self._turns = TurnTaking(engine.tokenizer, engine_thread=engine, metrics=metrics)

    async def run(self, leases: Sequence[PromptLease]) -> None:
        """Answer and grade the prompts of ``leases``."""
        for lease in leases:
            job = Job(lease, at_s=0.0, state=JobState.GENERATING)
            try:
                job.prompt = await self._task.prompt(lease, self._engine.tokenizer)
                self._turns.begin(job)
            except (TaskError, RefusedError) as error:
                self._end(job, problem=str(error))
        while self._engine.running:
            for request in await asyncio.to_thread(self._engine.step):
                await self._note(request)

    async def _note(self, finished: GenerationRequest) -> None:
        if (spoken := self._turns.note(finished, self._task)) is None:
            return
        job, waiting = spoken
        try:
            for conversation in waiting:
                await self._turns.reply(job, conversation, self._task)
            if self._turns.take_generated(job):
                self._end(job, await self._graded(job))
        except (TaskError, RefusedError) as error:
            self._turns.cancel([job.lease.lease_id])
            self._end(job, problem=str(error))

    async def _graded(self, job: Job) -> tuple[dict[str, Any], ...]:
        assert job.prompt is not None, "a generated job has a prompt"
        texts, grades = await self._task.grade(job.prompt, job.conversations)
        rights = _right_answers(job.lease.row, self._options)
        return tuple(
            {
                "text": _spoken(conversation),
                "reward": grades.rewards[number],
                "tokens": text.tokens,
                "finish": text.finish,
                "metrics": {name: values[number] for name, values in grades.metrics.items()},
                **_graded_part(text, self._options, rights),
            }
            for number, (conversation, text) in enumerate(zip(job.conversations, texts, strict=True))
        )

    def _end(self, job: Job, completions: tuple[dict[str, Any], ...] = (), *, problem: str = "") -> None:
        token_ids = () if job.prompt is None else tuple(job.prompt.token_ids.tolist())
        rights = _right_answers(job.lease.row, self._options)
        self._done(TriedGroup(job.lease.prompt_index, token_ids, completions, rights, problem))


def _right_answers(row: bytes, options: TaskOptions | None) -> tuple[str, ...]:
    """Return the right answers of a row; none where it has none, which its problem says."""
    if not isinstance(options, JsonlOptions):
        return ()
    try:
        return options.made_grader.right_answers(json.loads(row))
    except RowError:
        return ()


def _graded_part(
    completion: CompletionText, options: TaskOptions | None, rights: Sequence[str]
) -> dict[str, str]:
    """Return what of a completion was graded, or why nothing; empty where the grader gets all of it."""
    if not isinstance(options, PromptOptions):
        return {}
    grader = options.made_grader if isinstance(options, JsonlOptions) else None
    if grader is not None and not grader.shows_answer:
        return {}
    part = answer_part(completion.text, completion.finish, options)
    if part.stripped is None:
        return {"no_answer": part.why_none}
    compared = None if grader is None else grader.compared_part(part.stripped, rights)
    return {"graded": part.stripped} | ({} if compared is None else {"compared": compared})


def _spoken(conversation: Conversation) -> str:
    if len(conversation.messages) == 1:
        return str(conversation.messages[0]["content"])
    return "\n".join(f"[{message['role']}] {message['content']}" for message in conversation.messages)
