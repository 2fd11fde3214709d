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
    is_shown: bool = False
    """Whether cosines are worked out, for which each contribution of several is decoded once more."""


@dataclass(frozen=True, slots=True)
class Merged:
    """Figures of a merge, for people."""

    norm: float = 0.0
    """Euclidean norm of the merged change."""
    contributions: int = 0
    """Contributions with a change."""
    cosines: Mapping[str, float] = field(default_factory=dict)
    """By contributor; see ``cosines_with``. Empty: there was one alone, or nobody asked."""

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
        self.changes = merged_changes(inputs, shapes, words_before=words_before)
        norm = sum(float(one.square().sum()) for one in self.changes.values()) ** 0.5
        contributions = sum(bool(one.contribution.payload) for one in inputs.handed_in)
        cosines: dict[str, float] = {}
        if inputs.is_shown and contributions > 1:
            cosines = cosines_with(self.changes, inputs, shapes, words_before=words_before)
        of_merge = {"lr": inputs.settings.outer_rate, "momentum": inputs.settings.outer_momentum}
        for group in self.param_groups:
            group.update(of_merge)
        self.step()
        return Merged(norm, contributions, cosines)


def merged_changes(inputs: MergeInputs, shapes: Shapes, *, words_before: WordsBefore) -> dict[str, Tensor]:
    """Return what the contributions that have it make of each tensor's change; float64.

    They are decoded side by side: memory for the result and two tensors of each contribution.

    Raises:
        ValueError: a payload is broken.
    """
    settings = inputs.settings
    weights = weights_of([one.worked for one in inputs.handed_in], settings.weighting)
    coded = [
        (one.contribution.payload, weight)
        for one, weight in zip(inputs.handed_in, weights, strict=True)
        if one.contribution.payload
    ]
    names = sorted(shapes)
    if settings.compression == "word_changes":
        names = [span.name for span in words_before.layout.tensors]
    place = {name: number for number, name in enumerate(names)}

    def decoded(payload: bytes, weight: float) -> Iterator[tuple[str, float, Tensor]]:
        for name, change in decode_tensors(payload, settings, shapes, words_before=words_before):
            yield name, weight, change

    in_order = heapq.merge(*(decoded(*one) for one in coded), key=lambda one: place[one[0]])
    merged = {}
    for name, of_tensor in groupby(in_order, key=itemgetter(0)):
        changes = [(weight, change) for _, weight, change in of_tensor]
        if len(changes) < len(coded):  # contributions of other fragments say nothing of it
            share = sum(weight for weight, _ in changes)
            changes = [(weight / share, change) for weight, change in changes]
        merged[name] = combined(changes, settings.combine)
    return merged


def cosines_with(
    merged: Mapping[str, Tensor], inputs: MergeInputs, shapes: Shapes, *, words_before: WordsBefore
) -> dict[str, float]:
    """Return the cosine of each contribution's change with the merged one, over the tensors that it has.

    Between contributions that learn the same it is near 1, and 1/sqrt(n) between n that are at right angles.
    0 where one of the two is zero. Memory for a tensor.
    """
    cosines = {}
    for one in inputs.handed_in:
        if not (payload := one.contribution.payload):
            continue
        product = own = whole = 0.0
        for name, change in decode_tensors(payload, inputs.settings, shapes, words_before=words_before):
            product += float((change * merged[name]).sum())
            own += float(change.square().sum())
            whole += float(merged[name].square().sum())
        cosines[one.contributor] = product / (own * whole) ** 0.5 if own and whole else 0.0
    return cosines


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
