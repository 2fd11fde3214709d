"""Samples of what the model writes: every n versions the text, rewards and advantages of a few groups."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from learner.objective.formulas.advantage import standardised_advantage
from learner.step_log import StepLine
from node.page.samples_file import CompletionSample, GroupSample, SamplesFile
from node.values.groups.rollout import Completion, RolloutGroup

MOST_COMPLETIONS: Final = 16
"""Completions written of a group; of a larger one, the best and the worst half of this many."""

MOST_CHARACTERS: Final = 20_000
"""Characters written of a text; of a longer one, beginning and end. A line stays below 2 MiB."""


class SampleWriter:
    """A step writer whose records are lines of ``samples.jsonl``."""

    name = "samples"

    def __init__(self, file: SamplesFile, tokenizer: Tokenizer, *, every_versions: int, groups: int) -> None:
        """Write ``groups`` groups of every version that is a multiple of ``every_versions``.

        Groups of a batch that taught nothing are written at any version, so that somebody looks at them.
        """
        self._file = file
        self._tokenizer = tokenizer
        self._every_versions = every_versions
        self._groups = groups
        self._first_groups = groups

    def write_of(self, line: StepLine | None, batch: Sequence[RolloutGroup]) -> Callable[[], None] | None:
        """Return the append of some groups of a step's batch, or of the first groups, as of version 0.

        It raises OSError where the disk is full or failing.
        """
        if line is None:
            first = batch[: self._first_groups]
            self._first_groups -= len(first)
            return partial(self._append, first, line) if first else None
        version = line.version
        if line.is_step and version % self._every_versions:
            return None
        # A batch is sorted by age: its first groups would not show what the model writes now.
        numbers = random.Random(version).sample(range(len(batch)), min(self._groups, len(batch)))
        return partial(self._append, [batch[number] for number in sorted(numbers)], line)

    def close(self) -> None:
        """Do nothing: every append is on disk."""

    def _append(self, chosen: Sequence[RolloutGroup], line: StepLine | None) -> None:
        self._file.append(self._sample(each, line) for each in chosen)

    def _sample(self, group: RolloutGroup, line: StepLine | None) -> GroupSample:
        rewards = torch.tensor([one.reward for one in group.completions], dtype=torch.float64)
        advantages: list[float] = standardised_advantage(rewards).tolist()
        pairs = list(zip(group.completions, advantages, strict=True))
        return GroupSample(
            version=0 if line is None else line.version,
            at_s=group.spooled_at_s if line is None else line.at_s,
            group_id=group.group_id,
            sampler_id=group.sampler_id,
            task=group.task,
            prompt_index=group.prompt_index,
            prompt=self._text(group.prompt_token_ids),
            prompt_tokens=len(group.prompt_token_ids),
            staleness_versions=(0 if line is None else line.version_before) - group.oldest_version,
            group_size=len(pairs),
            completions=tuple(
                self._completion(*pairs[number], metrics=_metrics(group, number))
                for number in _extremes(rewards.tolist())
            ),
        )

    def _completion(
        self, completion: Completion, advantage: float, *, metrics: dict[str, float]
    ) -> CompletionSample:
        return CompletionSample(
            text=self._text(completion.token_ids),
            reward=completion.reward,
            advantage=advantage,
            tokens=completion.drawn_tokens,
            finish=completion.finish.value,
            oldest_version=int(completion.policy_version.min()),
            newest_version=int(completion.policy_version.max()),
            metrics=metrics,
        )

    def _text(self, token_ids: NDArray[np.int32]) -> str:
        return _shortened(self._tokenizer.decode(token_ids.tolist(), skip_special_tokens=False))


def load_tokenizer(model_dir: Path) -> Tokenizer:
    """Load the tokenizer whose digest every peer compared."""
    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


def _metrics(group: RolloutGroup, number: int) -> dict[str, float]:
    """Return what the grader measured of a completion."""
    values = {name: float(of_all[number]) for name, of_all in sorted(group.metrics.items())}
    return {name: value for name, value in values.items() if not math.isnan(value)}


def _extremes(rewards: Sequence[float]) -> list[int]:
    """Return the numbers of the completions to keep, in order."""
    by_reward = sorted(range(len(rewards)), key=lambda number: rewards[number])
    if len(by_reward) > MOST_COMPLETIONS:
        by_reward = by_reward[: MOST_COMPLETIONS // 2] + by_reward[-(MOST_COMPLETIONS // 2) :]
    return sorted(by_reward)


def _shortened(text: str) -> str:
    left_out = len(text) - MOST_CHARACTERS
    if left_out <= 0:
        return text
    half = MOST_CHARACTERS // 2
    return f"{text[:half]}\n[{left_out} characters left out]\n{text[-half:]}"
