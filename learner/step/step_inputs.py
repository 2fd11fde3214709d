"""The inputs of a step: a batch and its settings.

The same for a new step and for one that is taken again from the journal, on every rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from learner.journal.progress import Progress
from learner.model.rank_exchanges import Instruction
from learner.objective.entropy_switch import EntropySwitch
from learner.objective.menu import MENU
from learner.step_settings import StepSettings
from node.errors import StartupError
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.wire.rollouts import group_from_wire, source_of


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step to take."""

    groups: Sequence[RolloutGroup]
    """Admitted, whole, at least one."""
    version: int
    """The learner's before the step."""
    settings: StepSettings

    @property
    def instruction(self) -> Instruction:
        """The step as it is sent to the other ranks."""
        encoded = [source_of(group) for group in self.groups]
        values = {"version": self.version, "settings": self.settings.model_dump()}
        blobs = [part for group in encoded for part in group.parts]
        return Instruction("step", values, blobs)

    @classmethod
    def of(cls, instruction: Instruction, *, objective: str) -> Self:
        """Read an instruction.

        Args:
            objective: the configured one; another that is not built in is not imported.
        Raises:
            StartupError: its objective is neither built in nor configured.
        """
        told = instruction.values
        settings = StepSettings.model_validate(told["settings"])
        if settings.objective not in MENU and settings.objective != objective:
            raise StartupError(
                f"the first rank's objective is {settings.objective!r}, this one's {objective!r}",
                fix="Start all ranks with one configuration.",
            )
        parts = iter(instruction.blobs)
        return cls(
            [
                group_from_wire(EncodedGroup(header, columns)).without_abstained()
                for header, columns in zip(parts, parts, strict=True)
            ],
            version=told["version"],
            settings=settings,
        )


def next_step(groups: Sequence[RolloutGroup], settings: StepSettings, progress: Progress) -> StepInputs:
    """Return the step to take from where ``progress`` is, without SFPO's fast steps once they are over."""
    fast_steps = settings.fast_steps * switch_before(progress, settings).is_on
    return StepInputs(
        groups,
        version=progress.version,
        settings=settings.model_copy(update={"fast_steps": fast_steps}),
    )


def switch_before(progress: Progress, settings: StepSettings) -> EntropySwitch:
    """Return SFPO's switch as a step with these settings finds it."""
    return replace(progress.entropy_switch, threshold=settings.fast_steps_until_deviations)


def versions_of_tokens(group: RolloutGroup) -> NDArray[np.int64]:
    """Return the version that drew each drawn token of a group."""
    versions = [completion.of_drawn(completion.policy_version) for completion in group.completions]
    return np.concatenate(versions).astype(np.int64)


def token_ages(group: RolloutGroup, *, version: float) -> tuple[tuple[float, float], ...]:
    """Return each staleness that drawn tokens of a group have at ``version``, and their share.

    A completion that was sampled while versions were swapped has tokens of several.
    """
    drawn_from = versions_of_tokens(group)
    numbers, tokens = np.unique(drawn_from, return_counts=True)
    return tuple(
        (version - number, count / drawn_from.size)
        for number, count in zip(numbers.tolist(), tokens.tolist(), strict=True)
    )
