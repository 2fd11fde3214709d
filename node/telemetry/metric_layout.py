"""The names, types and labels of a peer's samples, without their values; pure.

A peer sends its metrics whole once and then their values alone. Here the whole ones are checked: a peer
cannot use another peer's labels, another role's names, or memory without bound. What breaks a rule is left
out and counted, and the values in its places are passed over.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from node.run import Role
from node.telemetry.metrics import MetricFamily

RULES: Final = ("name", "shape", "samples")
SAMPLES_PER_PEER: Final[dict[Role, int]] = {
    Role.LEARNER: 1200,
    Role.RELAY: 500,
    Role.SAMPLER: 500,
    Role.VERIFIER: 500,
}
"""Three to four times what a peer has."""
_FAMILY_NAME: Final = re.compile(r"heterorl_(node|learner|sampler|relay|verifier)_[a-z0-9_]{1,100}")
_LABEL_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,62}")
_RESERVED_LABELS: Final = frozenset({"node", "role", "quantile"})
_SUFFIXES: Final = {
    "counter": frozenset({"_total"}),
    "gauge": frozenset({""}),
    "histogram": frozenset({"_bucket", "_count", "_sum"}),
}
_LABEL_VALUE_CHARACTERS: Final = 200
_HELP_CHARACTERS: Final = 400

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Column:
    """One sample of a family."""

    family: str
    type: str
    sample: str
    """Name with its suffix."""
    labels: tuple[tuple[str, str], ...]
    """In order of name."""
    help: str = field(compare=False)

    @property
    def is_added_up(self) -> bool:
        """Whether it only grows, so that sums over peers mean something."""
        return self.type != "gauge"


@dataclass(frozen=True, slots=True)
class Layout:
    """The samples of a peer, in the order of its values."""

    columns: tuple[Column, ...]
    """The samples that are kept."""
    places: tuple[int, ...]
    """Where their values are among those that the peer sends."""
    width: int
    """How many values it sends."""

    def kept(self, values: Sequence[float]) -> Values | None:
        """Return the values of the columns; None if the peer sent another number of values than it said."""
        if len(values) != self.width:
            return None
        all_values = np.array(values, dtype=np.float64)
        return all_values if len(self.places) == self.width else all_values[list(self.places)]


def values_of(families: Sequence[MetricFamily]) -> list[float]:
    """Return the values of all samples, in order."""
    return [sample.value for family in families for sample in family.samples]


def shape_of(families: Sequence[MetricFamily]) -> tuple[object, ...]:
    """Return all of them but values and help, to compare with another time's."""
    return tuple(
        (family.name, family.type, tuple((one.name, tuple(one.labels.items())) for one in family.samples))
        for family in families
    )


def layout_of(families: Sequence[MetricFamily], role: Role, refused: Counter[str]) -> Layout:
    """Return the layout of a peer's metrics; count in ``refused`` what breaks a rule."""
    columns: list[Column] = []
    places: list[int] = []
    seen: set[str] = set()
    place, room = 0, SAMPLES_PER_PEER.get(role, 0)
    for family in families:
        first, place = place, place + len(family.samples)
        name = _FAMILY_NAME.fullmatch(family.name)
        if name is None or name[1] not in ("node", role) or family.name in seen:
            refused["name"] += 1
        elif not _is_well_formed(family):
            refused["shape"] += 1
        elif len(columns) + len(family.samples) > room:
            refused["samples"] += 1
        else:
            seen.add(family.name)
            for number, sample in enumerate(family.samples):
                labels = tuple(sorted(sample.labels.items()))
                columns.append(
                    Column(family.name, family.type, sample.name, labels, family.help[:_HELP_CHARACTERS])
                )
                places.append(first + number)
    return Layout(tuple(columns), tuple(places), place)


def _is_well_formed(family: MetricFamily) -> bool:
    suffixes = _SUFFIXES.get(family.type, frozenset())
    series = {(sample.name, *sorted(sample.labels.items())) for sample in family.samples}
    return len(series) == len(family.samples) and all(
        sample.name.startswith(family.name)
        and sample.name.removeprefix(family.name) in suffixes
        and all(
            _LABEL_NAME.fullmatch(name)
            and name not in _RESERVED_LABELS
            and len(value) <= _LABEL_VALUE_CHARACTERS
            for name, value in sample.labels.items()
        )
        for sample in family.samples
    )
