"""A contributor's masters, and what their next change is measured from.

    anchor --steps--> local --hand in--> sent
                        |                  |
    words of a version -+------------------+--> v, the version near what was handed in
                        '--> local rebased on v (``overlap``), and v is the next anchor

Of a tensor that is not handed in, as of a fragment whose turn it is not, the steps stay on top of the next
version. Blocking, and in place: anchor and what is sent take 4 bytes a parameter each.
"""

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from learner.masters.master_words import typed_parts
from learner.merging.changes.coder import MasterChanges
from learner.merging.formulas.overlap import masters_of_words, rebased
from learner.merging.formulas.stability import Overlap
from learner.model.model import Policy
from node.weights.format.digests import Words


class LocalMasters:
    """The masters of a policy; only steps and this write them."""

    def __init__(self, policy: Policy) -> None:
        """Measure the next change from the masters as they are."""
        self._layout = policy.layout
        self._flat = {name: tensor.detach().view(-1) for name, tensor in policy.tensors.items()}
        self.trainable: dict[str, Tensor] = dict(policy.parameters)
        """Tensors that steps move, by name; the others follow the versions."""
        self._anchor = {name: tensor.detach().clone() for name, tensor in self.trainable.items()}
        self._sent: dict[str, Tensor] = {}

    @property
    def are_sent(self) -> bool:
        """Whether what was handed in is in no version that was adopted."""
        return bool(self._sent)

    def changes(self, names: Collection[str]) -> MasterChanges:
        """Return what has changed of some trainable tensors since the anchor."""
        anchor = {name: self._anchor[name] for name in names}
        return MasterChanges(self.trainable, anchor)

    @torch.no_grad()
    def hand_in(self, names: Collection[str], *, overlap: Overlap) -> None:
        """Note that the changes of ``names`` are handed in."""
        for name in names:
            local = self.trainable[name].detach()
            self._sent[name] = local.clone().view(-1)
            if overlap == "delayed":
                local.copy_(self._anchor[name])

    @torch.no_grad()
    def adopt(self, words_of: Callable[[int], Words], *, overlap: Overlap, is_refused: bool) -> None:
        """Go over to a version; ``words_of`` returns a frame's words.

        Args:
            is_refused: whether what was handed in is not in it.
        """
        for number in range(len(self._layout.frames)):
            for name, entries, typed in typed_parts(self._layout, number, words_of(number)):
                local = self._flat[name][entries]
                words = typed[: local.numel()].to(local.device)
                if name not in self.trainable:
                    local.copy_(masters_of_words(words, local))
                    continue
                anchor = self._anchor[name].view(-1)[entries]
                sent = self._sent[name][entries] if name in self._sent else None
                merged = masters_of_words(words, anchor if sent is None or is_refused else sent)
                based = anchor if sent is None else sent
                kept = "eager" if sent is None else overlap
                local.copy_(rebased(local, based, anchor, merged, overlap=kept))
                anchor.copy_(merged)
        self._sent = {}
