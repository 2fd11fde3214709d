"""Environments of Prime Intellect's ``verifiers`` 0.1: its data sets, turns, tools and rubrics as a task.

An environment runs its own rollout, as its authors wrote it, and takes what the sampler's engine draws for
the answers of a model's server (``drawn_turns``). Between two calls a rollout waits in this process. It is
found by what was said in it so far: rollouts of equal conversations are interchangeable.

From 0.2 on, environments drive programs that call a model's server themselves: no turn can be handed to them.
"""

import asyncio
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final

from pydantic import Field, JsonValue

from node.grading.completion import CompletionText, Message, Row
from node.tasks.task_options import TaskOptions
from node.values.limits import GROUP_METRICS, PROMPT_TOKENS

MOST_ROLLOUTS: Final = 4096
"""Rollouts that wait at once; those of groups that were dropped are never asked for again."""


class VerifiersOptions(TaskOptions):
    """Options of ``verifiers``: prompts, turns, tools and rewards of an environment of that library."""

    extra = "verifiers"

    environment: str = Field(pattern=r"^([a-z0-9-]+/)?[a-z][a-z0-9_-]*$")
    """Its id, such as ``wordle``. Samplers have it installed, and in ``sampler.allowed_graders`` as
    ``wordle:load_environment``."""
    arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of its ``load_environment``."""
    template_arguments: dict[str, JsonValue] = Field(default_factory=dict)
    """As of ``jsonl``; an environment's tools are among them already."""
    max_prompt_tokens: int | None = Field(default=None, ge=1, le=PROMPT_TOKENS)
    """Prompts of more tokens are set aside as ``prompt_too_long``."""

    @property
    def package(self) -> str | None:
        return "verifiers"

    @property
    def named_code(self) -> tuple[str, str] | None:
        return "environment", f"{self.environment.split('/')[-1].replace('-', '_')}:load_environment"

    @property
    def template_need(self) -> str | None:
        return "its prompts are messages"


class VerifiersTask:
    """The prompts of one environment; options as in ``VerifiersOptions``."""

    is_stateful = True

    def __init__(self, **options: Any) -> None:
        # An extra: imported only where it is used.
        from verifiers import load_environment

        from sampler.tasks.environments import drawn_turns

        given = VerifiersOptions.model_validate(options)
        self._environment = load_environment(given.environment, **given.arguments)
        if self._environment.rubric.has_group_rewards:
            raise ValueError(f"{given.environment} rewards completions of a group by each other")
        self._rows = self._environment.get_dataset()
        self.prompts = len(self._rows)
        self.max_prompt_tokens = given.max_prompt_tokens
        most = getattr(self._environment, "max_turns", 1)
        self.max_turns = most if most > 0 else None
        self.template_arguments = _template_arguments(self._environment.tool_defs)
        self._drawn_turns: Any = drawn_turns
        self._loop = asyncio.new_event_loop()
        self._waiting: list[tuple[int, Any]] = []

    def prompt(self, index: int, row: Row | None) -> Sequence[Message]:
        messages: list[Message] = self._drawn_turns.plain(self._rows[index]["prompt"])
        return messages

    def reply(self, index: int, row: Row | None, conversation: Sequence[Message]) -> Sequence[Message] | None:
        return self._loop.run_until_complete(self._reply(index, list(conversation)))

    def grade(
        self, index: int, row: Row | None, completion: CompletionText
    ) -> tuple[float, dict[str, float]]:
        said = list(completion.conversation) or [{"role": "assistant", "content": completion.text}]
        is_cut = completion.finish == "length"
        state = self._loop.run_until_complete(self._state(index, said, is_cut=is_cut))
        if state["error"] is not None:
            raise RuntimeError(f"the environment failed: {state['error']!r}")
        metrics = {name.lower(): float(value) for name, value in state["metrics"].items()}
        return float(state["reward"]), dict(islice(metrics.items(), GROUP_METRICS))

    async def _reply(self, index: int, said: list[Message]) -> Sequence[Message] | None:
        rollout = self._waiting_for(index, said)
        await rollout.go_on(said[-1]["content"], is_cut=False)
        self._waiting.append((index, rollout))
        if len(self._waiting) > MOST_ROLLOUTS:
            self._waiting.pop(0)[1].cancel()
        return rollout.reply or None

    async def _state(self, index: int, said: list[Message], *, is_cut: bool) -> Any:
        for place, (of, rollout) in enumerate(self._waiting):
            if of == index and rollout.heard == said:
                del self._waiting[place]
                return await rollout.state()
        # Its last turn was not handed in: nobody asked for a reply to it.
        rollout = self._waiting_for(index, said)
        await rollout.go_on(said[-1]["content"], is_cut=is_cut)
        return await rollout.state()

    def _waiting_for(self, index: int, said: list[Message]) -> Any:
        """Return the rollout that waits for the last of ``said``."""
        for place, (of, rollout) in enumerate(self._waiting):
            if of == index and [*rollout.heard, *(rollout.reply or ())] == said[:-1]:
                del self._waiting[place]
                return rollout
        if len(said) > 1:
            raise RuntimeError(f"no rollout of this conversation waits, which has {len(said)} messages")
        return self._drawn_turns.Rollout(self._environment, self._rows[index])


def _template_arguments(tools: Any) -> dict[str, Any]:
    """Return what chat templates take for tools."""
    functions = [
        {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        for tool in tools or ()
    ]
    return {"tools": [{"type": "function", "function": one} for one in functions]} if functions else {}
