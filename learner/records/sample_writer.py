"""Writes down what the model writes: every n versions the text, rewards and advantages of a few groups."""

import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer

from learner.objective.advantage import standardised_advantage
from learner.records.group_sample import CompletionSample, GroupSample
from learner.records.samples_file import SamplesFile
from learner.step_log import StepLine
from node.rollout import Completion, DeliveredGroup, RolloutGroup

MOST_COMPLETIONS: Final = 16
"""Of a group; of a larger one the best half and the worst half of this many."""

MOST_CHARACTERS: Final = 20_000
"""Of a text; of a longer one, beginning and end. With MOST_COMPLETIONS a line stays below 2 MiB."""


class SampleWriter:
    """A step writer whose records are lines of ``samples.jsonl``."""

    name = "samples"

    def __init__(self, file: SamplesFile, tokenizer: Tokenizer, *, every_versions: int, groups: int) -> None:
        """Write ``groups`` groups of every version that is a multiple of ``every_versions``.

        Those of a batch that taught nothing are written whatever its version: somebody should look at them.
        """
        self._file = file
        self._tokenizer = tokenizer
        self._every_versions = every_versions
        self._groups = groups
        self._first_groups = groups

    def write_of(self, line: StepLine, batch: Sequence[DeliveredGroup]) -> Callable[[], None] | None:
        """Return what appends some groups of the step's batch, if it is the version's turn.

        That raises OSError where the disk is full or failing.
        """
        version, before = line.report.version, line.version_before
        if line.is_step and version % self._every_versions:
            return None
        # A batch is sorted by age: its first groups would not show what the model writes now.
        numbers = random.Random(version).sample(range(len(batch)), min(self._groups, len(batch)))
        chosen = [batch[number] for number in sorted(numbers)]
        at_s = line.at_s
        return lambda: self._file.append(
            self._sample(each, version=version, version_before=before, at_s=at_s) for each in chosen
        )

    def write_of_first(self, delivered: DeliveredGroup, *, at_s: float) -> Callable[[], None] | None:
        """Return what appends a group that came before the first step, as of version 0; None: enough did."""
        if not self._first_groups:
            return None
        self._first_groups -= 1
        return lambda: self._file.append([self._sample(delivered, version=0, version_before=0, at_s=at_s)])

    def close(self) -> None:
        """Do nothing: every append is on disk."""

    def _sample(
        self, delivered: DeliveredGroup, *, version: int, version_before: int, at_s: float
    ) -> GroupSample:
        group = delivered.group
        rewards = torch.tensor([one.reward for one in group.completions], dtype=torch.float64)
        advantages: list[float] = standardised_advantage(rewards).tolist()
        pairs = list(zip(group.completions, advantages, strict=True))
        return GroupSample(
            version=version,
            at_s=at_s,
            group_id=group.group_id,
            sampler_id=delivered.sampler_id,
            task=group.task,
            prompt_index=group.prompt_index,
            prompt=self._text(group.prompt_token_ids),
            prompt_tokens=len(group.prompt_token_ids),
            staleness_versions=version_before - group.oldest_version,
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
