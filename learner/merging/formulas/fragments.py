"""Fragments: parts of the model that are merged in turn, one a round.

    round       0    1    2    3    4   ...
    fragment    0    1    2    0    1   ...         of 3

A change has the tensors of the fragment that is due, measured from the version in which they were merged
last; the others are trained on and wait. A fragment's change thus holds as many rounds' steps as there are
fragments, unless the fragment that is due is trained alone. Each round needs one fragment's share of the
line.

Source: Streaming DiLoCo, arXiv:2501.18512, section 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class Fragments:
    """Names of the tensors of each fragment."""

    names: tuple[tuple[str, ...], ...]
    """In the model's order."""

    @classmethod
    def of(cls, sizes: Mapping[str, int], *, count: int) -> Self:
        """Deal whole tensors out: the largest first, each to the smallest fragment so far.

        No fragment is larger than 4/3 of the largest of the best partition (Graham 1969). The first of
        equals.

        Args:
            sizes: entries of each tensor, by name, in the model's order.
            count: how many fragments.

        Raises:
            ValueError: there are fewer tensors than fragments.
        """
        if len(sizes) < count:
            raise ValueError(f"a model of {len(sizes)} tensors has no {count} fragments; set fragments lower")
        filled = [0] * count
        fragment: dict[str, int] = {}
        for name in sorted(sizes, key=lambda each: -sizes[each]):
            fragment[name] = filled.index(min(filled))
            filled[fragment[name]] += sizes[name]
        return cls(tuple(tuple(name for name in sizes if fragment[name] == p) for p in range(count)))

    def due(self, merge_round: int) -> int:
        """Return which fragment a round merges; rounds count from 0."""
        return merge_round % len(self.names)

    def due_names(self, version: int) -> tuple[str, ...]:
        """Return the tensors that a change measured from a version has."""
        return self.names[self.due(version)]
