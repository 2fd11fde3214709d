"""Policies that draw noise masks: an action is a real number for each cell of a grid over an image."""

from typing import Final

from node.kinds.kind import Kind

KIND: Final = Kind(
    "noise_mask",
    has_architecture=lambda name: name == "NoiseMaskModel",
    model_class="node.kinds.noise_mask.network:NoiseMaskModel",
    scorer="node.kinds.noise_mask.scorer:NoiseMaskScorer",
    engine="node.kinds.noise_mask.engine:NoiseMaskEngine",
    can_be_shared=False,
)
