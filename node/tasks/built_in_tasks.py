"""The built-in tasks by name: where each one's code and options are. Nothing is imported here.

To add a task, write it and its options, and name both here.
"""

from collections.abc import Mapping
from typing import Final, NamedTuple


class BuiltInTask(NamedTuple):
    """Import paths, ``package.module:Class``."""

    task: str
    """The class that makes prompts and grades; see ``sampler.tasks.task.Task``."""
    options: str
    """Its ``node.tasks.task_options.TaskOptions``."""


_KINDS: Final = "node.kinds"

KINDS: Final = ("noise_mask", "ranking")
"""Kinds of policies that are not language models: folders of ``node.kinds``, each with a task of its name."""

BUILT_IN: Final[Mapping[str, BuiltInTask]] = {
    "addition": BuiltInTask("sampler.tasks.addition:AdditionTask", "node.tasks.task_options:AdditionOptions"),
    "jsonl": BuiltInTask("sampler.tasks.question_tasks:JsonlTask", "node.grading.jsonl_options:JsonlOptions"),
    "reasoning_gym": BuiltInTask(
        "sampler.tasks.reasoning_gym_task:ReasoningGymTask",
        "sampler.tasks.reasoning_gym_task:ReasoningGymOptions",
    ),
    "verifiers": BuiltInTask(
        "sampler.tasks.environments.verifiers_task:VerifiersTask",
        "sampler.tasks.environments.verifiers_task:VerifiersOptions",
    ),
    **{kind: BuiltInTask(f"{_KINDS}.{kind}.task:TASK", f"{_KINDS}.{kind}.task:OPTIONS") for kind in KINDS},
}
"""Task name -> its code."""
