"""The interface of a task, and which class a task's name stands for.

The coordinator sends a task's name. Which code it stands for is decided here or in this sampler's own
configuration, never over the wire.
"""

import importlib
from collections.abc import Mapping
from typing import Final, Protocol

from node.errors import ConfigError


class Task(Protocol):
    """Prompts with a reward for each completion.

    A task runs in processes of its own, with limits; several at once if it is slow. ``prompt`` is called once
    for every lease, so it may draw a new prompt each time. If ``grade`` needs what ``prompt`` drew, set
    ``is_stateful = True`` on the class: then the process that made a prompt also grades it, and groups whose
    process was killed meanwhile are given back. Otherwise any process may grade.
    """

    @property
    def prompts(self) -> int:
        """How many prompts there are; indices run from 0."""
        ...

    def prompt(self, index: int) -> str:
        """Return the text a completion continues; not empty."""
        ...

    def grade(self, index: int, text: str) -> float:
        """Return the finite reward of a completion, given without special tokens."""
        ...


BUILT_IN: Final[Mapping[str, str]] = {"addition": "sampler.tasks.addition:AdditionTask"}
"""Task name -> import path."""


def import_path(name: str, custom: Mapping[str, str]) -> str:
    """Return the ``package.module:Class`` that ``name`` stands for.

    Raises:
        ConfigError: ``name`` is neither built in nor in ``custom``.
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
    """Import ``package.module:Class`` and instantiate it.

    Raises:
        ConfigError: it cannot be imported or instantiated.
    """
    module, _, name = path.partition(":")
    try:
        task: Task = getattr(importlib.import_module(module), name)()
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise unusable(path, str(error)) from error
    return task


def unusable(path: str, problem: str) -> ConfigError:
    """Return the error that says why ``path`` does not name a task."""
    return ConfigError(
        key="sampler.custom_tasks",
        value=path,
        source="the configuration",
        rule=f"must name a class that can be imported and instantiated without arguments: {problem}",
        fix="Name a class installed next to this daemon, as package.module:ClassName",
    )
