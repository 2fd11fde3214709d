"""The run's task on this sampler: which leases it has prompts for, and what they and its replies are."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from node.errors import ConfigError, RefusedError, StartupError
from node.questions.messages import content_text
from node.values.groups.failure import Failure
from node.values.groups.rollout import PromptLease
from node.values.limits import PROMPT_TOKENS
from sampler.config import GradingConfig
from sampler.engines.engine import Tokenizer
from sampler.metrics import GraderMetrics
from sampler.rollouts.conversation import Conversation
from sampler.rollouts.task_setup import task_setup
from sampler.tasks.processes.grader_pool import GraderPool, Prompt
from sampler.tasks.processes.grader_process import Grader
from sampler.tasks.processes.grader_requests import Grades, TaskDescription, TaskError, TaskUnusableError
from sampler.tasks.task import CompletionText, Message, TaskSetup, unusable


@dataclass(frozen=True, slots=True)
class RunTask:
    """A task whose graders have started."""

    name: str
    digest: bytes
    """Digest of the name and options."""
    prompts: int
    """How many the run has to train on."""
    description: TaskDescription
    template_arguments: Mapping[str, Any]
    graders: GraderPool
    grades: bool = True
    """Whether this peer grades; otherwise verifiers do, and the graders only make prompts."""

    @classmethod
    async def load(
        cls,
        name: str,
        options: Mapping[str, Any],
        *,
        digest: bytes,
        rows: int,
        group_size: int,
        config: GradingConfig,
        metrics: GraderMetrics,
        grades: bool = True,
    ) -> Self:
        """Start the graders of a task.

        Args:
            digest: Of its name and options.
            rows: Of the run's data; 0: it has none.
            grades: Whether this peer grades.
        Raises:
            ConfigError: the task cannot be had or made here, or it and the data do not fit each other.
            StartupError: its process does not start, or lacks a key or a sandbox.
        """
        setup = await asyncio.to_thread(
            task_setup, config, name, options, group_size=group_size, grades=grades
        )
        graders = GraderPool(lambda: _grader(setup, config, metrics), most=config.grader_processes)
        metrics.watch(
            grader_processes=lambda: graders.processes, grader_queue_requests=lambda: graders.waiting
        )
        try:
            description = await _started(graders, setup)
            prompts = prompts_of(description, rows=rows, setup=setup)
            if not grades:
                _check_gradable_elsewhere(description)
        except BaseException:
            await graders.close()
            raise
        arguments = {**description.template_arguments, **setup.template_arguments}
        return cls(name, digest, prompts, description, arguments, graders, grades)

    @property
    def grader_digest(self) -> bytes:
        """Digest of the code that grades here; empty where none does."""
        return self.description.code_digest if self.grades else b""

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
        return await self.make_prompt(lease.prompt_index, lease.row, tokenizer)

    async def make_prompt(self, index: int, row: bytes, tokenizer: Tokenizer) -> Prompt:
        """Ask for a prompt as ``prompt`` does, by its index and its row of the run's data."""
        made = await self.graders.prompt(index, row.decode(errors="replace"))
        try:
            token_ids = await asyncio.to_thread(
                tokenizer.encode, made.content, {**self.template_arguments, **made.template_arguments}
            )
        except RefusedError as refused:
            raise TaskError(str(refused), fault=Failure.PROMPT_FAILED) from refused
        if not len(token_ids):
            raise TaskError("a prompt without tokens", fault=Failure.PROMPT_FAILED)
        if len(token_ids) > (most := self.description.max_prompt_tokens or PROMPT_TOKENS):
            raise TaskError(
                f"{len(token_ids)} tokens, max_prompt_tokens = {most}", fault=Failure.PROMPT_TOO_LONG
            )
        rendered = ""
        if self.description.sees_tokens:
            rendered = await asyncio.to_thread(tokenizer.decode_prompt, token_ids)
        return replace(made, token_ids=token_ids, rendered=rendered)

    async def reply(
        self, prompt: Prompt, conversation: Sequence[Message], tokenizer: Tokenizer
    ) -> tuple[Sequence[Message], NDArray[np.int32]] | None:
        """Return the reply to a completion's newest turn; None: the conversation is over.

        Returns:
            Messages, and tokens [n], n >= 1, with what the template writes around them.
        Raises:
            TaskError: it cannot be tokenized, or as ``GraderPool.reply``.
        """
        said = await self.graders.reply(prompt, conversation)
        if said is None:
            return None
        messages = [{"role": "user", "content": said}] if isinstance(said, str) else said
        if any(message["role"] == "assistant" for message in messages):
            raise _bad_reply("reply() speaks for the assistant")
        context: str | list[Message]
        if not isinstance(prompt.content, str):
            context = [*_continued(prompt.content, conversation), *messages]
        elif isinstance(said, str):
            context = said
        else:
            raise _bad_reply("reply() returned messages, and the prompt is a text")
        try:
            token_ids = await asyncio.to_thread(
                tokenizer.encode_reply, context, {**self.template_arguments, **prompt.template_arguments}
            )
        except RefusedError as refused:
            raise _bad_reply(str(refused)) from refused
        if not len(token_ids):
            raise _bad_reply("a reply without tokens")
        return messages, token_ids

    async def grade(
        self, prompt: Prompt, conversations: Sequence[Conversation]
    ) -> tuple[list[CompletionText], Grades]:
        """Return what the grader sees of a group's completions, and says; raises as ``GraderPool.grade``."""
        has_replies = self.description.max_turns > 1
        texts = [conversation.completion_text(has_replies=has_replies) for conversation in conversations]
        if self.description.sees_tokens:
            texts = [
                replace(text, token_ids=conversation.last_turn_ids.tolist(), prompt=prompt.rendered)
                for text, conversation in zip(texts, conversations, strict=True)
            ]
        return texts, await self.graders.grade(prompt, texts)


def _continued(prompt: Sequence[Message], conversation: Sequence[Message]) -> list[Message]:
    """Return a conversation with its prompt; what the model wrote first may go on an opened answer."""
    if prompt[-1]["role"] != "assistant":
        return [*prompt, *conversation]
    opened = {**prompt[-1], "content": content_text(prompt[-1]) + conversation[0]["content"]}
    return [*prompt[:-1], opened, *conversation[1:]]


def prompts_of(description: TaskDescription, *, rows: int, setup: TaskSetup) -> int:
    """Return how many prompts a run has: its rows, where it has data, or else the task's own.

    Raises:
        ConfigError: the task has prompts of its own besides the run's, or the run has none for it.
    """
    if rows and description.prompts is not None:
        raise unusable(
            setup,
            f"the run has data, and the task has {description.prompts} prompts of its own: set prompts = "
            "None on its class, and grade by the row, or leave coordinator.data out",
        )
    prompts = rows or description.prompts
    if prompts is None:
        raise unusable(setup, "its prompts are rows, and the run has none: set coordinator.data.file")
    return prompts


def _check_gradable_elsewhere(description: TaskDescription) -> None:
    """Raise ConfigError where only the process that made a prompt, or saw the turns, can grade."""
    if description.is_stateful or description.max_turns > 1:
        what = "is_stateful = True" if description.is_stateful else f"max_turns = {description.max_turns}"
        raise ConfigError(
            key="coordinator.graded_by",
            value="verifier",
            source="the coordinator",
            rule=f"needs a task that keeps no state and does not reply; this one has {what}",
            fix='Set coordinator.graded_by = "sampler", or change the task.',
        )


def _grader(setup: TaskSetup, config: GradingConfig, metrics: GraderMetrics) -> Grader:
    return Grader(
        setup,
        wall_limit_s=config.grader_wall_limit_s,
        cpu_limit_s=config.grader_cpu_limit_s,
        memory_limit_bytes=config.grader_memory_limit_bytes,
        killed=metrics.grader_kills.inc,
        failed=metrics.count_grader_outage,
    )


async def _started(graders: GraderPool, setup: TaskSetup) -> TaskDescription:
    try:
        return await graders.start()
    except TaskUnusableError as error:
        raise unusable(setup, str(error)) from error
    except TaskError as error:
        raise StartupError(
            f"the task {setup.path} does not start: {error}",
            fix=f"Raise {setup.section}.grader_memory_limit_bytes, or check what the task does when it is "
            "imported.",
        ) from error


def _bad_reply(what: str) -> TaskError:
    return TaskError(what, fault=Failure.GRADING_FAILED)
