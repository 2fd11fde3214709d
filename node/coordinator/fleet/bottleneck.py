"""Finds what bounds the pace of a run: the learner, the samplers, the link, a setting, or nothing; pure.

    look, look, ... --a minute, or some steps--> shares of time --rules, HOLD_S--> bottleneck

    the learner waits little    samplers are held back by a full queue           the learner; where it merges:
                                each contributor waits for half of the time      the exchange with them
                                otherwise                                        the contributors
    the learner hardly waits    otherwise                                        nothing alone
    the learner waits           a batch is there and does not get to it          what withholds it
                                samplers wait for versions more than they work   the link
                                a limit holds samplers back                      the setting of that limit
                                otherwise                                        the samplers

The learner measures its wait for groups before each step. Samplers' time is shared out by the waits that
their heartbeats name: a sampler that names none, or a fetch beside its work, generates. A look takes the
counts of a whole fleet, and knows no peer by name. ``held_back`` says which wait has which cause.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from node.coordinator.fleet.held_back import (
    CONTRIBUTORS,
    EXCHANGE,
    FULL_QUEUE,
    LEARNER,
    LINK,
    MERGED,
    NOTHING,
    SAMPLERS,
    UNFIT,
    Cause,
    held_back_by,
)
from node.values.bottleneck import Bottleneck

WINDOW_S: Final = 60.0
WINDOW_STRETCHES: Final = 8
"""The window has both, so that it spans whole steps however long one takes."""

LEAST_STRETCH_S: Final = 1.0
"""Shortest stretch but for the open one; a window has some seventy at most."""

LEAST_STEPS: Final = 3
"""Steps before the first answer: a run begins with empty queues, whatever bounds it afterwards."""

HOLD_S: Final = 10.0
"""For so long the window must say otherwise before the answer changes: near a threshold it would flap."""

LONGEST_LOOK_S: Final = 10.0
"""A look stands for the time since the one before, but for no more: a machine that slept saw nothing."""

WAITS_SHARE: Final = 0.1
"""The learner waits if it spends this share of its time so; with more groups it could save no more."""

EXCHANGE_SHARE: Final = 0.5
"""The exchange with contributors bounds the pace if it costs the slowest of them more than its steps do."""

HELD_BACK_SHARE: Final = 0.25
"""A limit holds samplers back if it costs this share of their time; every run touches one now and then. A
full queue is the learner's doing unless it, too, waits for so long: in a run by hand it waited an eighth of
its time at a queue full for two thirds; a longer queue could have saved that eighth and no more."""


@dataclass(frozen=True, slots=True)
class Look:
    """A run that goes on, at one moment."""

    at_s: float
    """Unix seconds."""
    version: int
    """Version of the newest step that the learner has reported."""
    groups_wait_s: float
    """The learner's wait for groups before that step."""
    waiting_s: float
    """Since when the learner waits for groups now, seconds; 0: it does not."""
    samplers: Mapping[str, int]
    """How many wait for what; empty name: for nothing."""
    contributors: Mapping[str, str] = field(default_factory=dict)
    """Wait of each contributor, by its name."""
    withheld_by: Cause | None = None
    """Why a batch that is there does not get to the learner; None: none is there."""
    tightest_limit: str = ""
    """The limit on leases that leaves the least room."""


@dataclass(slots=True)
class _Stretch:
    """A part of the window, added up."""

    seconds: float = 0.0
    steps: int = 0
    waited_s: float = 0.0
    samplers_s: defaultdict[Cause | None, float] = field(default_factory=lambda: defaultdict(float))
    """Samplers times seconds, by what held them back; None: nothing, they generated."""
    exchange_s: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which a contributor waited for a merged version, by its name."""
    withheld_s: defaultdict[Cause, float] = field(default_factory=lambda: defaultdict(float))
    """Seconds in which a batch was there and did not get to the learner, by the reason."""

    def add(self, look: Look, seconds: float) -> None:
        """Count the time up to a look as it found the run."""
        self.seconds += seconds
        if look.withheld_by is not None:
            self.withheld_s[look.withheld_by] += seconds
        for name, wait in look.contributors.items():
            self.exchange_s[name] += seconds * (wait == MERGED)
        for wait, samplers in look.samplers.items():
            if wait not in UNFIT:
                cause = held_back_by(wait, tightest_limit=look.tightest_limit)
                self.samplers_s[cause] += samplers * seconds

    def add_up(self, other: "_Stretch") -> None:
        """Add another part."""
        self.seconds += other.seconds
        self.steps += other.steps
        self.waited_s += other.waited_s
        for cause, seconds in other.samplers_s.items():
            self.samplers_s[cause] += seconds
        for reason, seconds in other.withheld_s.items():
            self.withheld_s[reason] += seconds
        for name, seconds in other.exchange_s.items():
            self.exchange_s[name] += seconds


class BottleneckWatch:
    """Finds what bounds a run's pace from looks at it.

    Attributes:
        found: The answer; None: too little was seen yet.
    """

    def __init__(self) -> None:
        self.found: Bottleneck | None = None
        self._other_since_s: float | None = None
        """Since when the window says otherwise than ``found``."""
        self._last: Look | None = None
        self._stretches: deque[_Stretch] = deque()
        """Each of whole steps, but for the last one, which is open. Empty before the first report: what came
        before it may be the loading of models."""

    def look(self, look: Look | None) -> None:
        """Take a look in; None: the run stands still, or its learner does not say how long it waits."""
        last, self._last = self._last, look
        if look is None or last is None or look.version < last.version:
            self._stretches.clear()
            self.found = self._other_since_s = None
            return
        if self._stretches:
            self._stretches[-1].add(look, min(max(0.0, look.at_s - last.at_s), LONGEST_LOOK_S))
        if look.version > last.version:
            self._note_steps(look.version - last.version, look.groups_wait_s)
        self._decide(look)

    def _note_steps(self, steps: int, groups_wait_s: float) -> None:
        """Note that so many steps were taken since the last report, each after about such a wait."""
        if not self._stretches:
            self._stretches.append(_Stretch())
            return
        ended = self._stretches[-1]
        ended.steps += steps
        ended.waited_s = min(ended.seconds, ended.waited_s + steps * groups_wait_s)
        if ended.seconds < LEAST_STRETCH_S:
            return
        seconds = sum(one.seconds for one in self._stretches)
        while len(self._stretches) > WINDOW_STRETCHES and seconds - self._stretches[0].seconds >= WINDOW_S:
            seconds -= self._stretches.popleft().seconds
        self._stretches.append(_Stretch())

    def _decide(self, look: Look) -> None:
        window = _Stretch()
        for one in self._stretches:
            window.add_up(one)
        if window.steps < LEAST_STEPS or not window.seconds:
            return
        window.waited_s += min(look.waiting_s, self._stretches[-1].seconds)
        found, shown = _bottleneck(window), self.found
        if shown is None or (found.by, found.setting) == (shown.by, shown.setting):
            self.found, self._other_since_s = found, None
        elif self._other_since_s is None:
            self._other_since_s = look.at_s
        elif not 0 <= look.at_s - self._other_since_s < HOLD_S:
            self.found, self._other_since_s = found, None


def _bottleneck(window: _Stretch) -> Bottleneck:
    wait, step_s = min(1.0, window.waited_s / window.seconds), window.seconds / window.steps
    present_s = sum(window.samplers_s.values())
    held_back = {
        cause: seconds / present_s
        for cause, seconds in window.samplers_s.items()
        if cause is not None and seconds
    }
    cause, more = _cause(window, wait, held_back)
    return Bottleneck(
        cause.by,
        f"the learner waited for groups {wait * step_s:.2f} s of each {step_s:.2f} s step{more}",
        cause.remedy,
        cause.setting,
        learner_wait_ratio=wait,
        held_back_ratio=min(1.0, sum(held_back.values())),
    )


def _trainers(window: _Stretch) -> tuple[Cause, str]:
    """Return what makes versions no faster, and what shows it: the slowest contributor's share of waiting."""
    if not window.exchange_s:
        return LEARNER, ""
    share = min(window.exchange_s.values()) / window.seconds
    waited = f"; each contributor waited {share:.0%} of its time or more for merged versions"
    return EXCHANGE if share >= EXCHANGE_SHARE else CONTRIBUTORS, waited


def _cause(window: _Stretch, wait: float, held_back: Mapping[Cause, float]) -> tuple[Cause, str]:
    """Return what bounds the pace, and what shows it besides the learner's wait.

    Args:
        wait: Share of the learner's time that it waited.
        held_back: Shares of the samplers' time, by what held them back.
    """
    full = sum(held_back.get(limit, 0.0) for limit in FULL_QUEUE)
    if wait < HELD_BACK_SHARE <= full:
        trainers, more = _trainers(window)
        return trainers, f", while samplers waited for it {full:.0%} of their time{more}"
    if wait < WAITS_SHARE:
        return NOTHING, ""
    for reason, seconds in window.withheld_s.items():
        # A batch that is there in a share r of all time is there in wait + r - 1 of it, at least, while the
        # learner waits: it is to blame if that is half of the wait.
        if seconds / window.seconds >= 1.0 - wait / 2:
            return reason, ", while a batch was there"
    generates = 1.0 - sum(held_back.values())
    large = (
        cause
        for cause, share in held_back.items()
        if (share > generates if cause is LINK else share >= HELD_BACK_SHARE)
    )
    worst = max(large, key=held_back.__getitem__, default=None)
    if worst is None:
        return SAMPLERS, f", and samplers generated {generates:.0%} of their time"
    return worst, f", while it held samplers back {held_back[worst]:.0%} of their time"
