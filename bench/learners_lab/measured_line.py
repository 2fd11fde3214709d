"""Measurements of ``bench.learner_lines``, and the tables that it makes of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final, Self

from bench.shared.markdown import table
from deploy.runs.contributions import Round

IN_STEP: Final = "in_step"
"""The method that others are compared with."""

_ABOUT: Final = """\
# Contributors behind slow lines

Two contributors, a learner that merges, a coordinator and a sampler as real processes over mutual TLS on one
machine; each contributor has an emulated line of 150 ms to all others. A model of {parameters:,} parameters
learns to add (`python -m bench.learner_lines`). *Seconds* pass from the first step until the mean reward of
the newest groups reaches the target. *Payload* is what contributors hand in, a parameter and a step; *fewer*
compares it with float32 changes of every step. *Up* and *down* are all that one line carries by then: TLS,
groups, versions, heartbeats.

*Steps*, *exchange* and *round* are medians over rounds: the time in steps; from a contribution to the words
of the version that has it; from one contribution to the next. Rounds whose exchange goes on beside the steps
should take the longer of both, others the sum.
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """A case that ran to its end."""

    case: str
    name: str
    rate_mbit: float
    parameters: int
    groups: int
    """Consumed by then."""
    reward: float
    """Mean of the last ``WINDOW_GROUPS``."""
    seconds: float | None
    """From the first step's begin to the target; None: it was not reached."""
    steps: int
    """Steps that all contributors handed in."""
    payload_bytes: int
    """Size of their changes."""
    up_bytes: int
    """On all lines, all connections."""
    down_bytes: int
    rounds: tuple[Round, ...]
    """Rounds of all contributors, the first of each left out."""

    @classmethod
    def of_line(cls, line: str) -> Self:
        """Return the measurements that ``asdict`` and JSON made a line of."""
        fields = json.loads(line)
        return cls(**{**fields, "rounds": tuple(Round(**one) for one in fields["rounds"])})

    @property
    def times_fewer(self) -> float:
        """Bytes of float32 changes of as many steps, over those of its payloads."""
        return 4 * self.parameters * self.steps / max(1, self.payload_bytes)


def read(lines: Path) -> list[Measured]:
    """Return all that a file has."""
    return [Measured.of_line(line) for line in lines.read_text().splitlines()] if lines.exists() else []


def write_report(path: Path, measured: Sequence[Measured]) -> None:
    """Write the tables of every line's rate."""
    parts = [_ABOUT.format(parameters=measured[0].parameters if measured else 0)]
    for rate in dict.fromkeys(one.rate_mbit for one in measured):
        here = [one for one in measured if one.rate_mbit == rate]
        parts += [f"## {rate:g} Mbit/s", _rewards_table(here), _rounds_table(here)]
    path.write_text("\n\n".join(parts) + "\n")


def _rewards_table(measured: Sequence[Measured]) -> str:
    first = next((one.seconds for one in measured if one.name == IN_STEP), None)
    rows = []
    for one in measured:
        faster = f"{first / one.seconds:.1f} x" if first and one.seconds else "-"
        seconds = "-" if one.seconds is None else f"{one.seconds:.0f}"
        payload = one.payload_bytes / one.parameters / max(1, one.steps)
        carried = (f"{each / 2e6:.1f} MB" for each in (one.up_bytes, one.down_bytes))
        learned = (one.name, seconds, faster, str(one.groups), f"{one.reward:.2f}")
        rows.append([*learned, f"{payload:.3g} B", f"{one.times_fewer:.0f} x", *carried])
    head = ["method", "seconds", "faster", "groups", "reward", "payload", "fewer", "up", "down"]
    return table(head, rows)


def _rounds_table(measured: Sequence[Measured]) -> str:
    rows = []
    for one in (each for each in measured if each.rounds):
        steps, exchange, whole = (
            median(getattr(each, name) for each in one.rounds)
            for name in ("steps_s", "exchange_s", "round_s")
        )
        took = (f"{each:.2f} s" for each in (steps, exchange, whole))
        over = (f"{whole / each:.2f}" for each in (max(steps, exchange), steps + exchange))
        rows.append([one.name, *took, *over, str(len(one.rounds))])
    head = ["method", "steps", "exchange", "round", "round / longer", "round / sum", "rounds"]
    return table(head, rows)
