"""A group as it is written down for people: a line of ``samples.jsonl``. Free of torch."""

import json
from dataclasses import asdict, dataclass, field
from typing import Final

from pydantic import TypeAdapter


@dataclass(frozen=True, slots=True)
class CompletionSample:
    """One completion as text."""

    text: str
    """Special tokens included; from a stranger's machine, it may hold anything."""
    reward: float
    advantage: float
    """Reward minus the mean of its group, over its standard deviation, as in GRPO; other objectives scale it
    in their own way."""
    tokens: int
    finish: str
    """What ended it: end, stop or length."""
    oldest_version: int
    """Oldest and newest version that drew a token."""
    newest_version: int
    metrics: dict[str, float] = field(default_factory=dict)
    """What the grader measured besides the reward; older lines lack it."""


@dataclass(frozen=True, slots=True)
class GroupSample:
    """A group that a step consumed."""

    version: int
    """The version that the step made; 0: it arrived before the first step."""
    at_s: float
    """Unix seconds on the learner's clock, when it was made."""
    group_id: str
    sampler_id: str
    task: str
    prompt_index: int
    prompt: str
    prompt_tokens: int
    staleness_versions: int
    group_size: int
    """Completions of the group; the ones of middle rewards may be left out below."""
    completions: tuple[CompletionSample, ...]

    def to_json(self) -> str:
        """Return one line of ASCII: no character of a completion reaches a terminal as it is."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, line: str | bytes) -> "GroupSample":
        """Read such a line.

        Raises:
            ValueError: it is not one.
        """
        return _GROUP.validate_json(line)


_GROUP: Final = TypeAdapter(GroupSample)
