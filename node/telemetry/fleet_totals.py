"""The metrics of all peers of one role, added up: so many series, however many peers; pure but for memory.

    counters, histograms   sums over peers of what each counted since it was first heard of here: a sum never
                           falls when a peer leaves, and what a peer counted before is not in it
    gauges                 quantiles over the peers that have them now, with their sum and number

The values of peers with the same samples are rows of one matrix. At most ``MOST_COLUMNS`` samples are shown,
those that most peers have: one peer with labels of its own displaces nobody's.

One thread writes; others may read meanwhile and see some rows of a moment later.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Final

import numpy as np
from prometheus_client import Metric

from node.identity.peer import Peer
from node.run import Role
from node.telemetry.metric_layout import Column, Layout, Values

QUANTILES: Final = (0.0, 0.5, 0.9, 1.0)
"""Lowest, median, one in ten is higher, highest."""

MOST_COLUMNS: Final = 400
"""About twice what samplers have. A gauge is six series: at most 2400, in practice 350."""

MOST_FOLDED: Final = 2000
"""Sums kept of samples that no peer has any more."""

_FIRST_ROWS: Final = 4


class _Group:
    """Peers with one layout."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.peers: list[Peer] = []
        self.rows = np.zeros((_FIRST_ROWS, len(layout.columns)))
        self.totals = np.zeros(len(layout.columns))
        """Sums of the columns that are added up; meaningless for the others."""

    def append(self, peer: Peer, values: Values) -> int:
        number = len(self.peers)
        if number == len(self.rows):
            self.rows = np.concatenate([self.rows, np.zeros_like(self.rows)])
        self.rows[number] = values
        self.peers.append(peer)
        return number

    def remove(self, number: int) -> Peer:
        """Remove a row; return the peer whose row took its place."""
        last = len(self.peers) - 1
        self.rows[number] = self.rows[last]
        moved = self.peers[number] = self.peers[last]
        self.peers.pop()
        if _FIRST_ROWS <= 4 * len(self.peers) < len(self.rows):
            self.rows = self.rows[: len(self.rows) // 2].copy()
        return moved


class FleetTotals:
    """The values of one role's peers, and their sums."""

    def __init__(self, role: Role) -> None:
        self._role = role
        self._groups: dict[Layout, _Group] = {}
        self._where: dict[Peer, tuple[_Group, int]] = {}
        self._folded: dict[Column, float] = {}

    def __len__(self) -> int:
        return len(self._where)

    def put(self, peer: Peer, layout: Layout, values: Values) -> None:
        """Replace a peer's values, and add what its counters grew by."""
        before = self._where.get(peer)
        if before is not None and before[0].layout == layout:
            group, number = before
            group.totals += growth(group.rows[number], values)
            group.rows[number] = values
            return
        group = self._groups.get(layout) or self._groups.setdefault(layout, _Group(layout))
        if before is not None:
            old = dict(zip(before[0].layout.columns, before[0].rows[before[1]].tolist(), strict=True))
            known = np.array([old.get(column, 0.0) for column in layout.columns])
            group.totals += growth(known, values)
        self.drop(peer)
        self._where[peer] = group, group.append(peer, values)

    def layout(self, peer: Peer) -> Layout | None:
        """Return what a peer's values are of; None: it has none here."""
        where = self._where.get(peer)
        return None if where is None else where[0].layout

    def values(self, peer: Peer) -> tuple[tuple[Column, float], ...]:
        """Return a peer's own samples; none if it has none here."""
        where = self._where.get(peer)
        if where is None:
            return ()
        group, number = where
        values = group.rows[number].tolist()
        if self._where.get(peer) is not where:  # it left meanwhile, and the row is another's
            return ()
        return tuple(zip(group.layout.columns, values, strict=True))

    def drop(self, peer: Peer) -> None:
        """Forget a peer's values; what it added to sums stays."""
        where = self._where.pop(peer, None)
        if where is None:
            return
        group, number = where
        moved = group.remove(number)
        if moved != peer:
            self._where[moved] = group, number
        if not group.peers:
            del self._groups[group.layout]
            for column, total in zip(group.layout.columns, group.totals.tolist(), strict=True):
                if column.is_added_up and (column in self._folded or len(self._folded) < MOST_FOLDED):
                    self._folded[column] = self._folded.get(column, 0.0) + total

    def worst(self, sample: str, *, is_highest: bool, most: int) -> list[tuple[float, Peer, Column]]:
        """Return the peers with the highest values of a sample above 0, or the lowest of all; worst first."""
        found: list[tuple[float, Peer, Column]] = []
        for group in tuple(self._groups.values()):
            peers = tuple(group.peers)
            for place, column in enumerate(group.layout.columns):
                if column.sample != sample:
                    continue
                values = np.nan_to_num(group.rows[: len(peers), place], nan=0.0 if is_highest else np.inf)
                order = np.argsort(-values if is_highest else values, kind="stable")[:most]
                found += ((float(values[n]), peers[n], column) for n in order.tolist())
        found = [one for one in found if np.isfinite(one[0]) and (one[0] > 0 or not is_highest)]
        return sorted(found, key=lambda one: -one[0] if is_highest else one[0])[:most]

    def collect(self) -> Iterator[Metric]:
        """Return a metric for each family, named ``heterorl_fleet_...``."""
        groups = tuple((group, len(group.peers)) for group in tuple(self._groups.values()))
        have: dict[Column, int] = defaultdict(int, dict.fromkeys(tuple(self._folded), 0))
        places: dict[Column, list[tuple[_Group, int, int]]] = defaultdict(list)
        for group, peers in groups:
            for place, column in enumerate(group.layout.columns):
                have[column] += peers
                places[column].append((group, peers, place))
        shown = sorted(have, key=lambda column: -have[column])[:MOST_COLUMNS]
        metrics: dict[str, Metric] = {}
        for column in shown:  # a family's type is that of the column most peers have
            kind = column.type if column.is_added_up else "summary"
            metric = metrics.get(column.family)
            if metric is None:
                name = column.family.replace("heterorl_", "heterorl_fleet_", 1)
                metric = metrics[column.family] = Metric(name, column.help, kind)
            if metric.type != kind:
                continue
            labels = dict(column.labels) | {"role": self._role.value}
            if column.is_added_up:
                total = sum(group.totals[place] for group, _, place in places[column])
                suffix = column.sample.removeprefix(column.family)
                metric.add_sample(metric.name + suffix, labels, float(total) + self._folded.get(column, 0.0))
            else:
                held = [group.rows[:peers, place] for group, peers, place in places[column]]
                add_summary(metric, labels, np.concatenate(held))
        for metric in metrics.values():
            _put_in_order(metric)
        yield from metrics.values()


def growth(before: Values, now: Values) -> Values:
    """Return by how much counters grew; one that fell was begun anew."""
    grown = np.where(now >= before, now - before, now)
    return np.where(np.isfinite(grown) & (grown > 0), grown, 0.0)


def add_summary(metric: Metric, labels: Mapping[str, str], values: Values) -> None:
    """Add quantiles, sum and number of finite values to a summary; without any only the number."""
    finite = values[np.isfinite(values)]
    if len(finite):
        quantiles = np.quantile(finite, QUANTILES, method="inverted_cdf")
        for quantile, value in zip(QUANTILES, quantiles.tolist(), strict=True):
            metric.add_sample(metric.name, {**labels, "quantile": f"{quantile:g}"}, value)
    metric.add_sample(f"{metric.name}_sum", dict(labels), float(finite.sum()))
    metric.add_sample(f"{metric.name}_count", dict(labels), float(len(finite)))


def _put_in_order(metric: Metric) -> None:
    """Put the samples of one set of labels together, as the text format wants them."""
    first: dict[tuple[tuple[str, str], ...], int] = {}

    def place(labels: Mapping[str, str]) -> int:
        own = tuple(sorted((name, value) for name, value in labels.items() if name not in ("le", "quantile")))
        return first.setdefault(own, len(first))

    metric.samples.sort(key=lambda sample: place(sample.labels))
