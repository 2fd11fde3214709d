"""What a task is, and which class a task name stands for.

The name of the task comes from the coordinator; the code it stands for is chosen here or in this
sampler's own configuration, never by what came over the wire.
"""

import importlib
from collections.abc import Mapping
from typing import Final, Protocol

from node.errors import ConfigError


class Task(Protocol):
    """Prompts with a reward that can be computed from the completion alone."""

    @property
    def prompts(self) -> int:
        """How many prompts there are; indices run from 0."""
        ...

    def prompt(self, index: int) -> str:
        """Give the text a completion continues."""
        ...

    def grade(self, index: int, text: str) -> float:
        """Give the finite reward of a completion, special tokens left out."""
        ...


BUILT_IN: Final[Mapping[str, str]] = {"addition": "sampler.tasks.addition:AdditionTask"}
"""Task name -> import path."""


def import_path(name: str, custom: Mapping[str, str]) -> str:
    """Give the ``package.module:Class`` that ``name`` stands for.

    Raises:
        ConfigError: neither built in nor in ``custom``.
    """
    known = {**BUILT_IN, **custom}
    if name not in known:
        raise ConfigError(
            key="coordinator.task",
            value=name,
            source="the coordinator",
            rule=f"this sampler knows the tasks {', '.join(sorted(known))}",
            fix="Add it to this sampler's sampler.custom_tasks or change coordinator.task",
        )
    return known[name]


def load_task(path: str) -> Task:
    """Import ``package.module:Class`` and make one.

    Raises:
        ConfigError: it cannot be imported or made.
    """
    module, _, name = path.partition(":")
    try:
        task: Task = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ConfigError(
            key="sampler.custom_tasks",
            value=path,
            source="the configuration",
            rule=f"does not name a class without arguments that can be imported: {error}",
            fix="Give package.module:ClassName of a class installed next to this daemon",
        ) from error
    return task
