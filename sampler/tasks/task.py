"""The interface of a task, and which code a task's name stands for.

The coordinator sends a task's name and its options, which are data. Which code they stand for is decided here
or in this sampler's own configuration, never over the wire.
"""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from node.errors import ConfigError
from node.grading.completion import CompletionText as CompletionText
from node.grading.completion import Graded as Graded
from node.grading.completion import GraderOutageError as GraderOutageError
from node.grading.completion import Message as Message
from node.grading.completion import Outage as Outage
from node.grading.completion import Row as Row
from node.tasks.built_in_tasks import BUILT_IN


class Task(Protocol):
    """Prompts with a reward for each completion.

    A task is made with ``coordinator.task_options`` as keyword arguments and runs in processes of its own,
    with limits; several at once if it is slow. ``prompt`` is called once for every lease, so it may draw a
    new prompt each time. If ``grade`` needs what ``prompt`` drew, set ``is_stateful = True`` on the class:
    then the process that made a prompt also grades it, and groups whose process was killed meanwhile are
    given back. Otherwise any process may grade. With ``max_prompt_tokens``, longer prompts are set aside.

    A task whose grader works on several completions at once has ``grade_group(index, row, completions)``,
    which is called instead and returns a list. It may raise ``GraderOutageError`` and count attempts that
    failed in an attribute ``outages``, a ``Counter`` of ``Outage``.

    A task whose grader gives the same rewards again says so: ``noise_ratio = 0.0`` on the class, or the share
    of groups, below 0.1, in which an honest second grading may differ, where it depends on time or machine.
    Then verifiers work out the rewards of some groups again. Without it, None, rewards are believed, unless
    the run leaves grading to verifiers.

    A task whose grader needs a completion's ``token_ids``, or the rendered ``prompt``, has ``sees_tokens =
    True`` on the class; a grader that is a function has it as an attribute. Others are not sent them.

    A task that offers the model other tools for each prompt has ``template_arguments_of(index, row)``, which
    returns variables of the chat template for that prompt alone, such as ``{"tools": [...]}``.

    A task that answers what the model writes has ``reply(index, row, conversation)`` as well. It is called
    after each turn with what was said since the prompt, as messages of which the model's have the role
    ``assistant``. It returns what is said next, a text or messages, and the model goes on; or None, and the
    conversation is over. A text is the user's message where the prompt was messages. ``max_turns`` of the
    class, 16 by default, bounds the model's turns, and ``max_new_tokens`` bounds turns and replies together.
    """

    @property
    def prompts(self) -> int | None:
        """How many prompts there are; indices run from 0. None: one for each row of the run's data."""
        ...

    def prompt(self, index: int, row: Row | None) -> str | Sequence[Message]:
        """Return the text a completion continues, or messages for the model's chat template; not empty.

        The same index makes the same prompt on every sampler, every time: verifiers compare its tokens with
        those that they make themselves.
        ``row`` is the prompt's row of the run's data; None where the run has no data.
        """
        ...

    def grade(self, index: int, row: Row | None, completion: CompletionText) -> Graded:
        """Grade one completion; may be a coroutine function, whose calls for a group run together."""
        ...


@dataclass(frozen=True, slots=True)
class TaskSetup:
    """Everything a process needs to make a task."""

    path: str
    """``package.module:Class``, or a function that returns a task."""
    options: Mapping[str, Any]
    """Its keyword arguments."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Variables of the chat template, for prompts that are messages."""
    local: Mapping[str, Any] = field(default_factory=dict)
    """Parts of this sampler's configuration: the argument ``local`` of a built-in task."""
    environment: Sequence[str] = ()
    """Names of variables of this sampler's environment that the process gets besides the usual ones."""
    served_at: str = ""
    """Socket at which the process is started; empty: the sampler starts it."""
    section: str = "sampler"
    """Section of the configuration that this is from, for errors."""


def import_path(name: str, custom: Mapping[str, str], *, section: str) -> str:
    """Return the ``package.module:Class`` of a name, built in or in ``custom``; ConfigError for others."""
    known = {**{built_in: places.task for built_in, places in BUILT_IN.items()}, **custom}
    if name not in known:
        raise ConfigError(
            key="coordinator.task",
            value=name,
            source="the coordinator",
            rule=f"this {section} knows the tasks {', '.join(sorted(known))}",
            fix=f"Add it to {section}.custom_tasks here, or change coordinator.task",
        )
    return known[name]


def load_task(setup: TaskSetup) -> Task:
    """Import ``package.module:Class`` and instantiate it; ConfigError if that is not possible, or no task."""
    module, _, name = setup.path.partition(":")
    try:
        local = {"local": setup.local} if setup.local else {}
        task: Task = getattr(importlib.import_module(module), name)(**setup.options, **local)
        methods = [task.prompt, task.grade, getattr(task, "reply", None)]
        takes = [_takes(method) for method in methods if method is not None]
    except Exception as error:
        # Whatever a task raises while it is made is the answer to whoever configured it.
        raise unusable(setup, f"{type(error).__name__}: {error}") from error
    if takes not in ([2, 3], [2, 3, 3]):
        raise unusable(
            setup,
            "its methods must be prompt(self, index, row) and grade(self, index, row, completion), and "
            "perhaps reply(self, index, row, conversation)",
        )
    return task


def unusable(setup: TaskSetup, problem: str) -> ConfigError:
    """Return the error that says why ``setup`` does not make a task."""
    return ConfigError(
        key=f"{setup.section}.custom_tasks",
        value=setup.path,
        source="the configuration",
        rule="must name a class that can be imported and instantiated with coordinator.task_options as "
        f"keyword arguments: {problem}",
        fix="Name a class installed next to this daemon, as package.module:ClassName, or change the options",
    )


def _takes(method: Callable[..., Any]) -> int:
    """Count the arguments that a method needs."""
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(method).parameters.values()
    return sum(p.kind in positional and p.default is p.empty for p in parameters)
