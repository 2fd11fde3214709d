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
    """Its ``node.task_options.TaskOptions``."""


BUILT_IN: Final[Mapping[str, BuiltInTask]] = {
    "addition": BuiltInTask("sampler.tasks.addition:AdditionTask", "node.task_options:AdditionOptions"),
    "jsonl": BuiltInTask("sampler.tasks.question_tasks:JsonlTask", "node.grading.jsonl_options:JsonlOptions"),
    "noise_mask": BuiltInTask(
        "sampler.tasks.noise_mask_task:NoiseMaskTask", "node.questions.noise_mask_row:NoiseMaskOptions"
    ),
    "ranking": BuiltInTask(
        "sampler.tasks.ranking_task:RankingTask", "node.questions.ranking_row:RankingOptions"
    ),
    "reasoning_gym": BuiltInTask(
        "sampler.tasks.reasoning_gym_task:ReasoningGymTask",
        "sampler.tasks.reasoning_gym_task:ReasoningGymOptions",
    ),
    "verifiers": BuiltInTask(
        "sampler.tasks.environments.verifiers_task:VerifiersTask",
        "sampler.tasks.environments.verifiers_task:VerifiersOptions",
    ),
}
"""Task name -> its code."""
