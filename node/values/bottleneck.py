"""The answer to what bounds the pace of a run, for people and scripts; values only."""

import enum
from dataclasses import dataclass


class BoundBy(enum.StrEnum):
    """Bounds of a run's pace. Closed: also the ``by`` label of metrics."""

    LEARNER = "learner"
    CONTRIBUTORS = "contributors"
    """They take the learner's steps."""
    EXCHANGE = "exchange"
    """The way of changes to the learner, and of merged versions back."""
    SAMPLERS = "samplers"
    VERIFIERS = "verifiers"
    LINK = "link"
    SETTING = "setting"
    NOTHING = "nothing"
    """Nothing alone: the parts are balanced."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The bound of the run's pace; fields as in membership.proto."""

    by: str
    """A ``BoundBy``; a later release may name others."""
    shown_by: str
    """The numbers that show it, one line for people."""
    remedy: str = ""
    setting: str = ""
    """Key of the setting, where it is one."""
    learner_wait_ratio: float = 0.0
    """Share of the learner's time that it waited for groups."""
    held_back_ratio: float = 0.0
    """Share of the samplers' time in which something but their own speed held them back."""

    @property
    def text(self) -> str:
        """The bound and its numbers, as a sentence without its full stop."""
        alone = "nothing alone" if self.by == BoundBy.NOTHING else f"the {self.by}"
        return f"bound by {self.setting or alone}: {self.shown_by}"
