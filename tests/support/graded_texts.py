"""Completions as graders see them, and graders with room for all but what a test limits."""

import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from sampler.config import SamplerConfig
from sampler.rollouts.task_setup import task_setup
from sampler.tasks.processes.grader_pool import GraderPool, Prompt
from sampler.tasks.processes.grader_process import Grader
from sampler.tasks.processes.grader_requests import Grades
from sampler.tasks.task import CompletionText, Row, TaskSetup


def texts(*written: str) -> list[CompletionText]:
    """Return completions of these texts, a token a character, that ended by themselves."""
    return [CompletionText(text, len(text), "end") for text in written]


def share_of_digits(row: Row, completion: CompletionText) -> tuple[float, dict[str, float]]:
    """Reward digits: a grader of one's own, which even a random model pleases now and then."""
    digits = sum(character.isdigit() for character in completion.text)
    return digits / max(1, len(completion.text)), {"tokens": completion.tokens, "row": row["sum"]}


def seen_tokens(row: Row, completion: CompletionText) -> tuple[float, dict[str, float]]:
    """Reward the last token that was drawn: a grader that sees tokens and the rendered prompt."""
    return float(completion.token_ids[-1]), {
        "prompt": len(completion.prompt),
        "seen": len(completion.token_ids),
    }


seen_tokens.sees_tokens = True  # type: ignore[attr-defined]  # as people write it
seen_tokens.noise_ratio = 0.0  # type: ignore[attr-defined]


def grader_of(task: TaskSetup | str, **settings: Any) -> Grader:
    """Return a grader of a task, or of an import path without options."""
    limits: dict[str, Any] = {"wall_limit_s": 30, "cpu_limit_s": 20, "memory_limit_bytes": 1 << 30}
    setup = TaskSetup(task, {}) if isinstance(task, str) else task
    return Grader(setup, **limits | {"killed": lambda: None} | settings)


def prompt_of(index: int, row: str = "") -> Prompt:
    """Return a prompt that nobody made."""
    return Prompt(index, row, "?", grader_of("a:B"), 1)


class LoneGrader:
    """One process that grades without having made the prompts."""

    def __init__(self, grader: Grader) -> None:
        self.process = grader
        self.pool = GraderPool(lambda: grader, most=1)

    async def grade(self, index: int, completions: Sequence[CompletionText], *, row: str = "") -> Grades:
        return await self.pool.grade(prompt_of(index, row), completions)


@asynccontextmanager
async def grading(task: TaskSetup | str, **settings: Any) -> AsyncIterator[LoneGrader]:
    """Run a grader, which is closed at the end."""
    lone = LoneGrader(grader_of(task, **settings))
    try:
        yield lone
    finally:
        await lone.pool.close()


def setup_of(
    name: str,
    options: Mapping[str, Any],
    *,
    has_chat_template: bool = False,
    group_size: int = 1,
    grades: bool = True,
    **settings: Any,
) -> TaskSetup:
    """Return a task on a sampler with these settings."""
    with tempfile.TemporaryDirectory() as model_dir:
        (Path(model_dir) / "chat_template.jinja").write_text("{{ messages }}" if has_chat_template else "")
        config = SamplerConfig.model_validate({"model_dir": model_dir, **settings})
        return task_setup(config, name, options, group_size=group_size, grades=grades)
