"""The numbers that peers report with their heartbeats, each 15 s: a handful for each role.

A new number needs a field here, one in membership.proto, and the place that fills it: ``figure`` says which
metric it is and how ``status`` shows it. Everything finer is on the peer's own /metrics.

    peer fills a dataclass --> Heartbeat --> coordinator --> PeerStatus --> text of `status`
                                                    '--> heterorl_coordinator_peer_<metric>, by name
                                                    '--> heterorl_coordinator_fleet_<metric>, over samplers

Unset (None) is not known and shown nowhere.
"""

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Final


class Worst(enum.Enum):
    """The end of a figure's range that an operator should look at."""

    HIGHEST = enum.auto()
    LOWEST = enum.auto()


@dataclass(frozen=True, slots=True)
class Figure:
    """How a number of a peer is shown."""

    metric: str
    """Name of the metric after ``heterorl_coordinator_peer_``, with its unit."""
    help: str
    text: str
    """Format of the number, for people."""
    worst: Worst
    alarm: float | None = None
    """Beyond it, towards the worst, an operator should look at the number; None: it is as it is."""

    def is_alarming(self, value: float) -> bool:
        """Whether an operator should look at it."""
        if self.alarm is None:
            return False
        return value > self.alarm if self.worst is Worst.HIGHEST else value < self.alarm


def figure(
    metric: str, help: str, *, text: str, worst: Worst = Worst.HIGHEST, alarm: float | None = None
) -> Any:
    """Return the field of a dataclass for a number that a peer reports."""
    return field(default=None, metadata={"figure": Figure(metric, help, text, worst, alarm)})


@dataclass(frozen=True, slots=True)
class MachineFigures:
    """Numbers of every member; fields as in membership.proto."""

    disk_free_ratio: float | None = figure(
        "disk_free_ratio",
        "Free share of the file system of a peer's state directory.",
        text="{:.1%} of its disk free",
        worst=Worst.LOWEST,
        alarm=0.1,
    )
    certificate_expiry_s: float | None = figure(
        "certificate_expiry_seconds",
        "Until a peer's certificate expires, by its own clock; below 0 it has.",
        text="certificate expires in {:.0f} s",
        worst=Worst.LOWEST,
        alarm=14 * 86_400,
    )
    mended_frames: int | None = figure(
        "mended_frames",
        "Frames whose words in a peer's memory had changed and were made again, since its start.",
        text="{:.0f} damaged frames in memory",
        alarm=0,
    )
    source_lies: int | None = figure(
        "source_lies",
        "Times a hub sent a peer what the learner had not signed, since its start.",
        text="lied to by a hub {:.0f} times",
        alarm=0,
    )


@dataclass(frozen=True, slots=True)
class SamplerFigures:
    """Numbers of samplers; fields as in membership.proto."""

    starving_s: float | None = figure(
        "starving_seconds",
        "For how long newer versions have been there and a sampler has taken none.",
        text="no version taken for {:.0f} s",
        alarm=60,
    )
    tokens_per_s: float | None = figure(
        "tokens_per_second",
        "Tokens that a sampler drew for finished groups, mean of the last minute.",
        text="{:.0f} tokens/s",
    )
    price_per_hour: float | None = figure(
        "price_per_hour",
        "A sampler's price, as it is configured there; unknown where it is 0.",
        text="{:.2f} an hour",
    )


FIGURES: Final = {
    one.name: one.metadata["figure"] for kind in (MachineFigures, SamplerFigures) for one in fields(kind)
}
"""Field -> how it is shown."""


def reported(*kinds: MachineFigures | SamplerFigures | None) -> Iterator[tuple[str, float]]:
    """Yield each number that is known, by the name of its field."""
    for kind in kinds:
        for one in () if kind is None else fields(kind):
            if (value := getattr(kind, one.name)) is not None:
                yield one.name, float(value)


def text_of(*kinds: MachineFigures | SamplerFigures | None, is_brief: bool = False) -> str:
    """Return the numbers that an operator should look at, for people, and unless it is to be brief, those
    without an alarm, too."""
    shown = (
        one.text.format(value)
        for one, value in ((FIGURES[name], value) for name, value in reported(*kinds))
        if one.is_alarming(value) or (one.alarm is None and value and not is_brief)
    )
    return ", ".join(shown)
