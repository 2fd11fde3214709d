"""The outer optimizer: moves masters by the mean change of a merge, in place of AdamW by a gradient.

A torch Optimizer over the same parameters: what waits for its steps, copies its state into checkpoints and
forgets it at a rollback needs to know no more of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from learner.merging.changes.coder import Shapes, decode_tensors
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.formulas.outer_step import mean_change, outer_step, weights_of
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
    """Euclidean norm of the mean change."""
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
        """Mean change of each tensor that the next step moves; float64."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # it has no loss to compute
        """Move the parameters by ``changes``."""
        rate, beta = self.param_groups[0]["lr"], self.param_groups[0]["momentum"]
        for name, change in self.changes.items():
            parameter = self._parameters[name]
            state = self.state[parameter] if beta else {}
            if beta and not state:
                state["momentum"] = torch.zeros_like(parameter)
            there = change.to(parameter.device)
            outer_step(parameter, state.get("momentum"), there, rate=rate, beta=beta)
        self.changes = {}

    def merge(self, inputs: MergeInputs, words_before: WordsBefore) -> Merged:
        """Move the parameters by the mean of some contributions; return its figures.

        Args:
            words_before: the version that is moved on.
        Raises:
            ValueError: a payload is broken; nothing has changed.
        """
        shapes = {name: parameter.shape for name, parameter in self._parameters.items()}
        self.changes = mean_changes(inputs, shapes, words_before=words_before)
        norm = sum(float(one.square().sum()) for one in self.changes.values()) ** 0.5
        contributions, cosines = sum(bool(one.payload) for one in inputs.handed_in), dict[str, float]()
        if inputs.is_shown and contributions > 1:
            cosines = cosines_with(self.changes, inputs, shapes, words_before=words_before)
        of_merge = {"lr": inputs.settings.outer_rate, "momentum": inputs.settings.outer_momentum}
        for group in self.param_groups:
            group.update(of_merge)
        self.step()
        return Merged(norm, contributions, cosines)


def mean_changes(inputs: MergeInputs, shapes: Shapes, *, words_before: WordsBefore) -> dict[str, Tensor]:
    """Return the weighted mean of each tensor's change, over the contributions that have one; float64.

    One contribution is decoded at a time, a tensor at a time: memory for one mean and a tensor.

    Raises:
        ValueError: a payload is broken.
    """
    weights = weights_of([one.report for one in inputs.handed_in], inputs.settings.weighting)
    means: dict[str, Tensor] = {}
    shares: dict[str, float] = {}
    for one, weight in zip(inputs.handed_in, weights, strict=True):
        if not one.payload:
            continue
        for name, change in decode_tensors(one.payload, inputs.settings, shapes, words_before=words_before):
            before = [(1.0, means[name])] if name in means else []
            means[name] = mean_change([*before, (weight, change)])
            shares[name] = shares.get(name, 0.0) + weight
    whole = max(shares.values(), default=1.0)
    for name, share in shares.items():
        if share != whole:  # contributions of other fragments say nothing of it
            means[name] /= share
    return means


def cosines_with(
    means: Mapping[str, Tensor], inputs: MergeInputs, shapes: Shapes, *, words_before: WordsBefore
) -> dict[str, float]:
    """Return the cosine of each contribution's change with the mean, over the tensors that it has.

    Between contributions that learn the same it is near 1, and 1/sqrt(n) between n that are at right angles.
    0 where one of the two is zero. Memory for a tensor.
    """
    cosines = {}
    for one in inputs.handed_in:
        product = own = mean = 0.0
        changed = decode_tensors(one.payload, inputs.settings, shapes, words_before=words_before)
        for name, change in changed if one.payload else ():
            product += float((change * means[name]).sum())
            own += float(change.square().sum())
            mean += float(means[name].square().sum())
        if one.payload:
            cosines[one.contributor] = product / (own * mean) ** 0.5 if own and mean else 0.0
    return cosines


def norm_of_change(
    payload: bytes, settings: MergeSettings, shapes: Shapes, *, words_before: WordsBefore
) -> float:
    """Return the Euclidean norm of a change. Raises ValueError: it is broken or not finite."""
    tensors = decode_tensors(payload, settings, shapes, words_before=words_before)
    squares = sum(float(change.square().sum()) for _, change in tensors)
    if not squares < float("inf"):
        raise ValueError("the norm of the change is not finite")
    return float(squares**0.5)
