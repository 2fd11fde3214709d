r"""Overlap: where a contributor stands when a merged version arrives.

    a    anchor: the version that its change was measured from, as float32 masters
    s    masters when it handed the change s - a in
    x    masters at the arrival, some steps later
    v    the merged version, as float32 masters

    wait      x <- v                 no steps were taken meanwhile
    eager     x <- x + (v - s)       it trained on from s: its own part counted at once, the others' comes now
    delayed   x <- x + (v - a)       it trained on from a: its own part comes now, with the others'

The next anchor is v in all three: the next change holds the steps taken while this one travelled, once.

Eager is the block correction of ParaBlock, x += mean d - own d, because v = a + mean d and s = a + own d. It
keeps a contributor's own steps whole until they are merged; arXiv:2502.12996 lets it keep its share 1/M of
them, which is stable for smaller rates (``stability``). Streaming DiLoCo mixes instead, x <- v + alpha (x -
v): alpha 0 is ``wait``, and alpha > 0 counts a share of the own part twice, which eager does not, so there is
no alpha here.

Sources: ParaBlock, arXiv:2511.19959, and DiLoCoX (delayed), arXiv:2506.21263, both known from their abstracts
only; eager updates, arXiv:2502.12996; Streaming DiLoCo, arXiv:2501.18512, section 3, and torchft's
local_sgd.py.
"""

import torch
from torch import Tensor

from learner.merging.formulas.stability import Overlap


def rebased(
    local: Tensor,
    sent: Tensor,
    anchor: Tensor,
    merged: Tensor,
    *,
    overlap: Overlap,
) -> Tensor:
    """Return the masters to go on from: x, s, a and v as above, of one shape; rounded once from float64.

    Where the version is what was handed in, eager returns ``local`` bit for bit.
    """
    if overlap == "wait":
        return merged.to(local.dtype)
    counted = sent if overlap == "eager" else anchor
    return (local.double() - (counted.double() - merged.double())).to(local.dtype)  # -0.0 - 0.0 is -0.0


def masters_of_words(words: Tensor, near: Tensor) -> Tensor:
    """Return float32 masters of a version of which only ``words`` in the model's type travelled.

    An entry of ``near``, the masters handed in, that rounds to the word keeps its value; the others become
    the word. A contributor that is alone therefore keeps its masters bit for bit.
    """
    return torch.where(near.to(words.dtype) == words, near, words.to(near.dtype))
