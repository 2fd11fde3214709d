"""Which prompts a run has on a sampler, and which leases are for them."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from node.errors import ConfigError
from node.values.groups.rollout import PromptLease
from node.values.groups.sampling_parameters import SamplingParameters
from sampler.engines.engine import Tokenizer
from sampler.rollouts.run_task import RunTask, prompts_of
from sampler.tasks.processes.grader_pool import GraderPool, Prompt
from sampler.tasks.processes.grader_requests import TaskDescription
from sampler.tasks.task import Message, TaskSetup
from support.graded_texts import grader_of
from support.refusals import naming


def description(prompts: int | None) -> TaskDescription:
    return TaskDescription(prompts=prompts)


@pytest.mark.parametrize(("prompts", "rows", "expected"), [(100, 0, 100), (None, 8, 8)], ids=str)
def test_rows_are_the_prompts_where_the_run_has_data(prompts: int | None, rows: int, expected: int) -> None:
    assert prompts_of(description(prompts), rows=rows, setup=TaskSetup("a:B", {})) == expected


@pytest.mark.parametrize(
    ("prompts", "rows", "names"),
    [(100, 8, ("100 prompts", "prompts = None")), (None, 0, ("coordinator.data.file",))],
)
def test_a_task_that_does_not_fit_the_data_is_refused_with_the_way_out(
    prompts: int | None, rows: int, names: tuple[str, ...]
) -> None:
    with naming(ConfigError, *names):
        prompts_of(description(prompts), rows=rows, setup=TaskSetup("a:B", {}))


@pytest.mark.parametrize(
    ("task", "index", "row", "has"),
    [
        ("addition", 9, b"", True),
        ("addition", 10, b"", False),
        ("addition", 10, b"{}", True),
        ("addition", -1, b"", False),
        ("other", 9, b"", False),
    ],
    ids=["known", "beyond the last", "a held-out row", "negative", "of another task"],
)
def test_a_lease_is_taken_for_a_known_prompt_or_one_that_brings_its_row(
    task: str, index: int, row: bytes, has: bool
) -> None:
    run_task = RunTask("addition", b"", 10, description(10), {}, GraderPool(lambda: grader_of("a:B"), most=1))
    lease = PromptLease("0.1", task, index, 4, SamplingParameters(1.0, 1.0, 0, 8), 60.0, row=row)
    assert run_task.has(lease) is has


async def test_a_reply_follows_the_answer_that_the_prompt_opened_and_the_model_went_on_with() -> None:
    """Templates that want roles to take turns would refuse two messages of the assistant in a row."""
    heard: list[Any] = []

    class Replying(GraderPool):
        async def reply(self, prompt: Prompt, conversation: Sequence[Message]) -> str:
            return "and?"

    class Listening:
        def encode_reply(self, reply: Any, arguments: Any) -> NDArray[np.int32]:
            heard.extend(reply)
            return np.array([1], np.int32)

    pool = Replying(lambda: grader_of("a:B"), most=1)
    task = RunTask("addition", b"", 10, description(10), {}, pool)
    asked: Message = {"role": "user", "content": "hi"}
    opened: Message = {"role": "assistant", "content": "Let "}
    drawn: list[Message] = [{"role": "assistant", "content": "me"}]
    cases: list[tuple[list[Message], list[Message]]] = [
        ([asked, opened], [asked, {**opened, "content": "Let me"}]),
        ([asked], [asked, *drawn]),
    ]
    for content, said in cases:
        heard.clear()
        prompt = Prompt(0, "", content, grader_of("a:B"), 1)
        assert await task.reply(prompt, drawn, cast("Tokenizer", Listening())) is not None
        assert heard == [*said, {"role": "user", "content": "and?"}]
