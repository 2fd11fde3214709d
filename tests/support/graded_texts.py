"""Completions as graders see them, and graders with room for all but what a test limits."""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from sampler.tasks.grader_process import Grader
from sampler.tasks.task import CompletionText, Row, TaskSetup, task_setup


def texts(*written: str) -> list[CompletionText]:
    """Return completions of these texts, a token a character, that ended by themselves."""
    return [CompletionText(text, len(text), "end") for text in written]


def share_of_digits(row: Row, completion: CompletionText) -> tuple[float, dict[str, float]]:
    """Reward digits: a grader of one's own, which even a random model pleases now and then."""
    digits = sum(character.isdigit() for character in completion.text)
    return digits / max(1, len(completion.text)), {"tokens": completion.tokens, "row": row["sum"]}


def grader_of(task: TaskSetup | str, **settings: Any) -> Grader:
    """Return a grader of a task, or of an import path without options."""
    limits: dict[str, Any] = {"wall_limit_s": 30, "cpu_limit_s": 20, "memory_limit_bytes": 1 << 30}
    setup = TaskSetup(task, {}) if isinstance(task, str) else task
    return Grader(setup, **limits | {"killed": lambda: None} | settings)


@asynccontextmanager
async def grading(task: TaskSetup | str, **settings: Any) -> AsyncIterator[Grader]:
    """Run a grader, which is closed at the end."""
    grader = grader_of(task, **settings)
    try:
        yield grader
    finally:
        await grader.close()


def setup_of(name: str, options: Mapping[str, Any], **sampler: Any) -> TaskSetup:
    """Return a task on a sampler that allows no code of its own, has no chat template, or as told."""
    usual: dict[str, Any] = {"custom": {}, "allowed_graders": (), "has_chat_template": False}
    return task_setup(name, options, **usual | sampler)
