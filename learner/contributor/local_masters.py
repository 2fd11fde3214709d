"""One rank's part of a contributor's masters, and what their next change is measured from.

    anchor --steps--> local --hand in--> sent
                        |                  |
    words of a version -+------------------+--> v, the version near what was handed in
                        '--> local rebased on v (``overlap``), and v is the next anchor

Of a tensor that is not handed in, as of a fragment whose turn it is not, the steps stay on top of the next
version. A change is coded on the first rank, which has one whole tensor at a time; what codes leave over lies
where the masters do, as everything else. Blocking, and in place: anchor, what is sent and what is left over
take 4 bytes a parameter each.
"""

import math
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from learner.merging.changes.coder import MasterChanges, difference
from learner.merging.formulas.overlap import masters_of_words, rebased
from learner.merging.formulas.stability import Overlap
from learner.model.model import Policy
from learner.model.rank_exchanges import Instruction
from node.weights.format.layout import TensorSpan

_ENTRIES: Final = 1 << 20
"""Rebased at once: intermediate values are float64."""


class LocalMasters:
    """Masters that only steps and this write. Each method tells the other ranks first."""

    def __init__(self, policy: Policy) -> None:
        """Measure the next change from the masters as they are."""
        self._layout = policy.layout
        self._ranks = policy.ranks
        self._parts = policy.ranks.parts(policy.tensors)
        self._trainable = dict(policy.parameters)
        self._flat = {name: policy.ranks.local(one).detach().view(-1) for name, one in policy.tensors.items()}
        self._anchor = {name: self._flat[name].clone() for name in self._trainable}
        self._sent: dict[str, Tensor] = {}
        self._left_over: dict[str, Tensor] = {}
        self.are_sent = False
        """Whether what was handed in is in no version that was adopted."""

    @property
    def shapes(self) -> Mapping[str, torch.Size]:
        """Shapes of the tensors that steps move, of all ranks; the others follow the versions."""
        return self._parts.trained

    def obey(self, instruction: Instruction) -> None:
        """Do what the first rank does now."""
        orders: Mapping[str, Callable[..., Any]] = {
            "train only": self.train_only,
            "due": self.due,
            "keep": self.keep,
            "hand in": self.hand_in,
            "adopt": self.adopt,
        }
        orders[instruction.name](**instruction.values)

    def train_only(self, names: Collection[str]) -> None:
        """Let the following steps move these tensors alone."""
        self._tell("train only", names=list(names))
        for name, parameter in self._trainable.items():
            parameter.requires_grad_(name in names)

    def changes(self, names: Collection[str], *, is_exact: bool) -> MasterChanges:
        """Return what is due of some tensors: what has changed since the anchor, and what was left over.

        Args:
            is_exact: in float64, and nothing is ever left over.
        """
        return MasterChanges(names, partial(self.due, is_exact=is_exact))

    def due(self, name: str, *, is_exact: bool) -> Tensor:
        """Return a tensor's due change; whole, on the first rank."""
        self._tell("due", name=name, is_exact=is_exact)
        part, dtype = None, torch.float64 if is_exact else torch.float32
        if name in self._anchor:
            part = difference(self._flat[name], self._anchor[name]).to("cpu", dtype)
            if (left_over := self._left_over.pop(name, None)) is not None:
                part += left_over
        with self._ranks.failures_named():
            return self._parts.gather(name, part, dtype)

    def keep(self, name: str, left_over: Tensor | None = None) -> None:
        """Keep what a code leaves over of a tensor, whole on the first rank, for its next change."""
        self._tell("keep", name=name)
        part = torch.empty(self._flat[name].numel()) if name in self._anchor else None
        with self._ranks.failures_named():
            self._parts.deal(name, left_over, part)
        if part is not None:
            self._left_over[name] = part

    @torch.no_grad()
    def hand_in(self, names: Collection[str], *, overlap: Overlap) -> float:
        """Note that the changes of ``names`` are handed in; return their norm."""
        self._tell("hand in", names=list(names), overlap=overlap)
        squares: dict[str, float] = {}
        for name in filter(self._anchor.__contains__, names):
            local, anchor = self._flat[name], self._anchor[name]
            squares[name] = float(difference(local, anchor).square().sum())
            self._sent[name] = local.clone()
            if overlap == "delayed":
                local.copy_(anchor)
        self.are_sent = True
        with self._ranks.failures_named():
            return math.sqrt(self._parts.total(squares))

    @torch.no_grad()
    def adopt(
        self, words: Callable[[TensorSpan], Tensor] | None = None, *, overlap: Overlap, is_refused: bool
    ) -> None:
        """Go over to a version.

        Args:
            words: returns a tensor's words, flat, in its dtype; on the first rank.
            is_refused: whether what was handed in is not in it.
        """
        self._tell("adopt", overlap=overlap, is_refused=is_refused)
        with self._ranks.failures_named():
            for span in self._layout.tensors:
                part = None
                if (local := self._flat.get(span.name)) is not None:
                    part = torch.empty(local.numel(), dtype=getattr(torch, span.dtype.name))
                self._parts.deal(span.name, None if words is None else words(span), part)
                if part is not None:
                    self._rebase(span.name, part, overlap=overlap, is_refused=is_refused)
        self._sent, self.are_sent = {}, False
        if is_refused:
            self._left_over.clear()  # it is of the steps that are undone

    def _rebase(self, name: str, words: Tensor, *, overlap: Overlap, is_refused: bool) -> None:
        for start in range(0, words.numel(), _ENTRIES):
            entries = slice(start, start + _ENTRIES)
            local, there = self._flat[name][entries], words[entries].to(self._flat[name].device)
            if name not in self._anchor:
                local.copy_(masters_of_words(there, local))
                continue
            anchor = self._anchor[name][entries]
            sent = self._sent[name][entries] if name in self._sent else None
            merged = masters_of_words(there, anchor if sent is None or is_refused else sent)
            based = anchor if sent is None else sent
            kept = "eager" if sent is None else overlap
            local.copy_(rebased(local, based, anchor, merged, overlap=kept))
            anchor.copy_(merged)

    def _tell(self, order: str, /, **values: Any) -> None:
        self._ranks.tell(lambda: Instruction(order, values))
