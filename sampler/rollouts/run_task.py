"""The run's task on this sampler: which leases it has prompts for, and what they and their grades are."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from node.errors import RefusedError, StartupError
from node.failure import Failure
from node.limits import PROMPT_TOKENS
from node.rollout import PromptLease
from sampler.engines.engine import Tokenizer
from sampler.rollouts.work_queue import Job, Prompt
from sampler.tasks.grader_pool import GraderPool
from sampler.tasks.grader_process import Grades, TaskDescription, TaskError, TaskUnusableError
from sampler.tasks.task import CompletionText, Message, TaskSetup, unusable


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a task says to a turn."""

    messages: Sequence[Message]
    token_ids: NDArray[np.int32]
    """[n], n >= 1: what the template writes around it as well."""


@dataclass(frozen=True, slots=True)
class RunTask:
    """A task whose graders have started."""

    name: str
    prompts: int
    """How many the run has to train on."""
    max_prompt_tokens: int
    max_turns: int
    """Of a completion; 1: the task does not reply."""
    template_arguments: Mapping[str, Any]
    graders: GraderPool
    digest: bytes = b""
    """Of its name and options."""
    code_digest: bytes = b""
    """Of the code that grades."""

    @classmethod
    async def start(
        cls, name: str, setup: TaskSetup, graders: GraderPool, *, rows: int, digest: bytes = b""
    ) -> Self:
        """Start the graders of a task.

        Args:
            rows: Of the run's data; 0: it has none.
            digest: Of its name and options.
        Raises:
            ConfigError: the task cannot be made, or it and the data do not fit each other.
            StartupError: its process does not start.
        """
        try:
            description = await graders.start()
        except TaskUnusableError as error:
            raise unusable(setup.path, str(error)) from error
        except TaskError as error:
            raise StartupError(
                f"the task {setup.path} does not start: {error}",
                fix="Raise sampler.grader_memory_limit_bytes, or check what the task does when it is "
                "imported.",
            ) from error
        return cls(
            name,
            prompts_of(description, rows=rows, path=setup.path),
            description.max_prompt_tokens or PROMPT_TOKENS,
            description.max_turns,
            {**description.template_arguments, **setup.template_arguments},
            graders,
            digest,
            description.code_digest,
        )

    def has(self, lease: PromptLease) -> bool:
        """Whether a lease is for a prompt of this task; held-out rows come after the others."""
        is_known = bool(lease.row) or lease.prompt_index < self.prompts
        is_same = (lease.task, lease.task_digest) == (self.name, self.digest)
        return is_same and lease.prompt_index >= 0 and is_known

    async def prompt(self, lease: PromptLease, tokenizer: Tokenizer) -> Prompt:
        """Ask for a lease's prompt once, and tokenize it in a thread: a long one takes a while.

        Raises:
            TaskError: there is none, it cannot be tokenized, or it is too long.
        """
        made = await self.graders.prompt(lease.prompt_index, _row(lease))
        try:
            token_ids = await asyncio.to_thread(tokenizer.encode, made.content, self.template_arguments)
        except RefusedError as refused:
            raise TaskError(str(refused), fault=Failure.PROMPT_FAILED) from refused
        if not len(token_ids):
            raise TaskError("a prompt without tokens", fault=Failure.PROMPT_FAILED)
        if len(token_ids) > self.max_prompt_tokens:
            raise TaskError(
                f"{len(token_ids)} tokens, max_prompt_tokens = {self.max_prompt_tokens}",
                fault=Failure.PROMPT_TOO_LONG,
            )
        return Prompt(made, token_ids)

    async def reply(self, job: Job, conversation: Sequence[Message], tokenizer: Tokenizer) -> Reply | None:
        """Ask for the reply to a completion's newest turn, and tokenize it; None: the conversation is over.

        Raises:
            TaskError: it cannot be tokenized, or as ``GraderPool.reply``.
        """
        assert job.prompt is not None, "a job that generates has a prompt"
        made, lease = job.prompt.made, job.lease
        said = await self.graders.reply(made, lease.prompt_index, conversation, _row(lease))
        if said is None:
            return None
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        is_chat = not isinstance(made.content, str)
        if not is_chat and not isinstance(said, str):
            raise TaskError(
                "reply() returned messages, and the prompt is a text", fault=Failure.GRADING_FAILED
            )
        if any(message["role"] == "assistant" for message in messages):
            raise TaskError("reply() speaks for the assistant", fault=Failure.GRADING_FAILED)
        context = [*made.content, *conversation, *messages] if is_chat else said
        try:
            token_ids = await asyncio.to_thread(tokenizer.encode_reply, context, self.template_arguments)
        except RefusedError as refused:
            raise TaskError(str(refused), fault=Failure.GRADING_FAILED) from refused
        if not len(token_ids):
            raise TaskError("a reply without tokens", fault=Failure.GRADING_FAILED)
        return Reply(messages, token_ids)

    async def grade(self, job: Job, texts: Sequence[CompletionText]) -> Grades:
        """Grade the completions of a generated job; raises as ``GraderPool.grade``."""
        assert job.prompt is not None, "a generated job has a prompt"
        return await self.graders.grade(job.prompt.made, job.lease.prompt_index, texts, _row(job.lease))


def prompts_of(description: TaskDescription, *, rows: int, path: str) -> int:
    """Return how many prompts a run has: its rows, where it has data, or else the task's own.

    Raises:
        ConfigError: the task has prompts of its own besides the run's, or the run has none for it.
    """
    if rows and description.prompts is not None:
        raise unusable(
            path,
            f"the run has data, and the task has {description.prompts} prompts of its own: set prompts = "
            "None on its class, and grade by the row, or leave coordinator.data out",
        )
    prompts = rows or description.prompts
    if prompts is None:
        raise unusable(path, "its prompts are rows, and the run has none: set coordinator.data.file")
    return prompts


def _row(lease: PromptLease) -> str:
    return lease.row.decode(errors="replace")
