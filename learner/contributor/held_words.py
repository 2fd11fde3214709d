"""The words of the version that a contributor trains from, made from a mirror's store.

    held words --deltas, or a keyframe or delta of the base and what follows--> words of a newer version

Both are in memory while one is made, 2 bytes a parameter each; it takes the place of the other once all of
its frames are verified.
"""

import numpy as np
import torch
from torch import Tensor

from node.errors import Reason, RefusedError
from node.values.policy import PolicyVersion
from node.weights.assembly.stored import StoredVersions, rebuild_frame
from node.weights.format.digests import Words
from node.weights.format.layout import TensorSpan
from node.weights.planning.cheapest_chain import plan_catch_up


class HeldWords:
    """A version's words, at first those of the base model."""

    def __init__(self, stored: StoredVersions, base: PolicyVersion) -> None:
        """Hold the base model."""
        self._stored = stored
        self._words: Words = np.array(stored.words0)
        self.version = base

    def frame(self, number: int) -> Words:
        """Return the words of one frame, which nobody may write."""
        return self._words[self._stored.layout.frames[number].slice]

    def tensor(self, span: TensorSpan) -> Tensor:
        """Return the words of one tensor, flat, in its dtype; nobody may write them."""
        words = torch.from_numpy(self._words[span.start_word :][: span.words])
        return words.view(getattr(torch, span.dtype.name))[: span.elements]

    def newest(self) -> int:
        """Return the newest version that this one and what is stored lead to. Blocking."""
        artifacts = [manifest.artifact for manifest in self._stored.store.whole()]
        held = self.version.number
        versions = sorted({artifact.key.version for artifact in artifacts}, reverse=True)
        return next((v for v in versions if v > held and plan_catch_up(held, v, artifacts)), held)

    def move_to(self, version: int) -> None:
        """Hold a newer version, or the same. Blocking.

        Raises:
            RefusedError: the held version stays. UNKNOWN_VERSION: nothing stored leads there any more;
                DAMAGED: an artifact is, and is fetched again; WRONG_BASE.
        """
        if version == self.version.number:
            return
        held, layout = self.version, self._stored.layout
        with self._stored.opened(version, held=held.number) as way:
            first, newest = way.manifests[0], way.manifests[-1]
            continues = first.key.base_version == held.number
            if continues and first.base_root != held.root:
                raise RefusedError(
                    Reason.WRONG_BASE, f"version {held.number} is not what {first.key} starts from"
                )
            words = np.empty_like(self._words)
            for number, frame in enumerate(layout.frames):
                start = self.frame(number) if continues else way.start(number)
                steps = list(zip(way.manifests, way.payloads(number), strict=True))
                words[frame.slice] = rebuild_frame(number, steps, layout=layout, start=start)
        self._words, self.version = words, newest.policy_version
