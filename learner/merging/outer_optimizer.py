"""The outer optimizer: moves masters by the change of a merge, in place of AdamW by a gradient.

A torch Optimizer over the same parameters: what waits for its steps, copies its state into checkpoints and
forgets it at a rollback needs to know no more of it.
"""

import heapq
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from learner.merging.changes.coder import Shapes, decode_tensors
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.formulas.outer_step import combined, outer_step, weights_of
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings


@dataclass(frozen=True, slots=True, eq=False)
class MergeInputs:
    """A merge to make."""

    handed_in: Sequence[HandedIn]
    """At least one with a change, in the order of the contributors' names."""
    settings: MergeSettings


@dataclass(frozen=True, slots=True)
class Merged:
    """Figures of a merge, for people."""

    norm: float = 0.0
    """Euclidean norm of the merged change."""
    contributions: int = 0
    """Contributions with a change."""
    cosines: Mapping[str, float] = field(default_factory=dict)
    """By contributor: of its change with the merged one, over the tensors that it has. Empty: it was alone.

    Near 1 between contributions that learn the same, 1/sqrt(n) between n that are at right angles; 0 where
    one of the two is zero.
    """

    @property
    def numbers(self) -> dict[str, Any]:
        """The numbers of its step, by name."""
        return {
            "merged_contributions": self.contributions,
            "merged_norm": self.norm,
            "merged_cosine_min": min(self.cosines.values(), default=None),
        }


class OuterOptimizer(torch.optim.Optimizer):
    """Nesterov momentum on changes. Its state is the momentum, and none while that is 0."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        """Move these, by name."""
        super().__init__(list(parameters.values()), {"lr": 1.0, "momentum": 0.0})
        self._parameters = parameters
        self.changes: Mapping[str, Tensor] = {}
        """Change of each tensor that the next step moves; float64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no loss to compute
        """Move the parameters by ``changes``."""
        rate, beta = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        if not beta:
            self.state.clear()
        for name, change in self.changes.items():
            parameter = self._parameters[name]
            state = self.state[parameter] if beta else {}
            if beta and not state:
                state["momentum"] = torch.zeros_like(parameter)
            there = change.to(parameter.device)
            outer_step(parameter, state.get("momentum"), there, rate=rate, beta=beta)
        self.changes = {}

    def merge(self, inputs: MergeInputs, words_before: WordsBefore) -> Merged:
        """Move the parameters by some contributions; return its figures.

        Args:
            words_before: the version that is moved on.
        Raises:
            ValueError: a payload is broken; nothing has changed.
        """
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        merged: dict[str, Tensor] = {}
        sums = {one.contributor: _Alignment() for one in inputs.handed_in if one.contribution.payload}
        squares = 0.0
        for name, whole, parts in merged_tensors(inputs, shapes, words_before=words_before):
            merged[name], square = whole, float(whole.square().sum())
            squares += square
            for contributor, part in parts.items():
                sums[contributor].add(part, whole, square=square)
        self.changes = merged
        cosines = {name: one.cosine for name, one in sums.items()} if len(sums) > 1 else {}
        of_merge = {"lr": inputs.settings.outer_rate, "momentum": inputs.settings.outer_momentum}
        for group in self.param_groups:
            group.update(of_merge)
        self.step()
        return Merged(squares**0.5, len(sums), cosines)


@dataclass(slots=True)
class _Alignment:
    """Sums over the tensors of a contribution's change, for its cosine with the merged one."""

    product: float = 0.0
    own: float = 0.0
    whole: float = 0.0

    def add(self, part: Tensor, whole: Tensor, *, square: float) -> None:
        self.product += float((part * whole).sum())
        self.own += float(part.square().sum())
        self.whole += square

    @property
    def cosine(self) -> float:
        both = self.own * self.whole
        return self.product / both**0.5 if both else 0.0


def merged_tensors(
    inputs: MergeInputs, shapes: Shapes, *, words_before: WordsBefore
) -> Iterator[tuple[str, Tensor, dict[str, Tensor]]]:
    """Yield each tensor's name, what contributions make of its change, and their changes; float64.

    They are decoded side by side: memory for two tensors of each contribution.

    Raises:
        ValueError: a payload is broken.
    """
    settings = inputs.settings
    weights = weights_of([one.worked for one in inputs.handed_in], settings.weighting)
    weight_of = {
        one.contributor: weight
        for one, weight in zip(inputs.handed_in, weights, strict=True)
        if one.contribution.payload
    }
    names = sorted(shapes)
    if settings.compression == "word_changes":
        names = [span.name for span in words_before.layout.tensors]
    place = {name: number for number, name in enumerate(names)}

    def decoded(one: HandedIn) -> Iterator[tuple[str, str, Tensor]]:
        payload = one.contribution.payload
        for name, change in decode_tensors(payload, settings, shapes, words_before=words_before):
            yield name, one.contributor, change

    coded = [decoded(one) for one in inputs.handed_in if one.contribution.payload]
    for name, of_tensor in groupby(heapq.merge(*coded, key=lambda one: place[one[0]]), key=itemgetter(0)):
        parts = {contributor: change for _, contributor, change in of_tensor}
        share = 1.0
        if len(parts) < len(coded):  # contributions of other fragments say nothing of it
            share = sum(weight_of[contributor] for contributor in parts)
        weighed = [(weight_of[contributor] / share, change) for contributor, change in parts.items()]
        yield name, combined(weighed, settings.combine), parts


def norm_of_change(
    payload: bytes,
    settings: MergeSettings,
    masters: Mapping[str, Tensor],
    *,
    due: Collection[str],
    words_before: WordsBefore,
) -> float:
    """Return the Euclidean norm of a change.

    Args:
        due: names of the tensors that may be changed.
    Raises:
        ValueError: it is broken or not finite, has other tensors, or is larger than the ``masters`` that it
            changes, so that it cannot be what steps have made of them.
    """
    shapes = {name: one.shape for name, one in masters.items()}
    squares = of_masters = 0.0
    for name, change in decode_tensors(payload, settings, shapes, words_before=words_before):
        if name not in due:
            raise ValueError(f"it changes {name}, whose turn it is not")
        squares += float(change.square().sum())
        of_masters += float(masters[name].detach().double().square().sum())
    if not squares <= of_masters:
        raise ValueError(f"its norm is {squares**0.5:.3g}, that of the masters {of_masters**0.5:.3g}")
    return float(squares**0.5)
