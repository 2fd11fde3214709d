"""A policy that draws masks, asked for log-densities of their cells, and the classifier trained beside it."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from learner.model.micro_batches import MicroBatch
from learner.model.scorer import UNBOUNDED, Scorer
from node.kinds.noise_mask.network import NoiseMaskModel, log_density, read_prompts
from node.kinds.noise_mask.values import MaskSizes
from node.values.groups.rollout import RolloutGroup


class NoiseMaskScorer(Scorer):
    """See ``values``. Both networks are small, and compute in the type of their parameters."""

    model: NoiseMaskModel

    def __init__(self, model: NoiseMaskModel, *, compute_dtype: torch.dtype | None = None) -> None:
        """Wrap ``model``; ``compute_dtype`` is for larger ones."""
        super().__init__(model, compute_dtype=None)
        self.context_tokens = UNBOUNDED
        self._sizes = MaskSizes.of(model.config.to_dict())

    def objection(self, group: RolloutGroup) -> str | None:
        return self._sizes.objection(group)

    def forward(self, inputs: Tensor, positions: Tensor, target_ids: Tensor, temperature: Tensor) -> Tensor:
        """Return the log-density of each cell of the rows' masks; see ``Scorer.forward``."""
        images, _, image_of_row = self._images(inputs)
        parameters: Tensor = self.model.policy(images)
        return log_density(target_ids.view(len(inputs), -1), parameters[image_of_row]).flatten()

    def beside_loss(self, part: MicroBatch) -> Tensor:
        """Return the classifier's cross-entropy on masked images, summed over rows."""
        images, labels, image_of_row = self._images(part.input_ids)
        masks = part.target_ids.view(len(part.input_ids), -1)
        logits = self.model(images[image_of_row], masks)
        return functional.cross_entropy(logits, labels[image_of_row], reduction="sum")

    @torch.no_grad()
    def step_taken(self, parts: Sequence[MicroBatch]) -> None:
        """Move the policy's base towards the mean over the step's rows."""
        sums, rows = torch.zeros_like(self.model.policy.base), 0
        for part in parts:
            images, _, image_of_row = self._images(part.input_ids)
            sums += self.model.policy.own(images)[image_of_row].sum(dim=0)
            rows += len(image_of_row)
        self.model.policy.follow(sums / rows)

    def _images(self, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the different images of rows, their labels, and which image each row has."""
        prompts, image_of_row = torch.unique(inputs[:, : 1 + self._sizes.pixels], dim=0, return_inverse=True)
        images, labels = read_prompts(prompts, self.model.config)
        return images.to(self.master_dtype), labels, image_of_row
