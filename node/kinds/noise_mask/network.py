"""The networks of a noise mask: a policy that draws masks, and the classifier that it regularises.

Both are one model in one directory, so that they are published, fetched and kept as one version. This module
needs torch, and only learner and sampler import it: both must compute the same densities.
"""

from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from torch.nn import functional
from transformers import (
    AutoConfig,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from node.kinds.noise_mask.values import EDGE, LEVELS

OWN_SHARE: Final = 0.1
"""Share of the image's own parameters in those drawn from; the rest is the base."""

BASE_SHARE: Final = 0.01
"""Share of a batch's mean in the base of the next step."""

LOG_PARAMETER: Final = 5.0
"""Largest magnitude of a and b: Beta(e^5, e^5) has a deviation of .03, and densities stay within float32."""


class NoiseMaskConfig(PreTrainedConfig):  # type: ignore[no-untyped-call]
    """Sizes of images, grid and networks."""

    model_type = "noise_mask"

    def __init__(
        self,
        *,
        height: int = 8,
        width: int = 8,
        channels: int = 1,
        classes: int = 10,
        grid: int = 8,
        features: int = 16,
        blur_kernel: int = 3,
        blur_sigma: float = 1.0,
        **others: Any,
    ) -> None:
        """Check and keep them.

        Args:
            grid: cells along a side of the mask.
            features: channels of the first layer, a multiple of 4.
            blur_kernel: pixels along a side of the Gaussian, odd; 1: no blur.
        Raises:
            ValueError: the blur does not fit the image.
        """
        if blur_kernel % 2 == 0 or blur_kernel // 2 >= min(height, width):
            raise ValueError(
                f"blur_kernel is {blur_kernel}; it must be odd, and reach less far than "
                f"{min(height, width)} pixels"
            )
        super().__init__(**others)
        self.height, self.width, self.channels, self.classes = height, width, channels, classes
        self.grid, self.features = grid, features
        self.blur_kernel, self.blur_sigma = blur_kernel, blur_sigma
        self.vocab_size = max(LEVELS, classes, grid * grid)


class _Block(nn.Module):
    """Two convolutions and what skips them; group norms, which know no batch."""

    def __init__(self, inner: int, outer: int, *, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inner, outer, 3, stride=stride, padding=1, bias=False)
        self.first_norm = nn.GroupNorm(4, outer)
        self.second = nn.Conv2d(outer, outer, 3, padding=1, bias=False)
        self.second_norm = nn.GroupNorm(4, outer)
        self.skip = nn.Conv2d(inner, outer, 1, stride=stride, bias=False)

    def forward(self, images: Tensor) -> Tensor:
        hidden = functional.relu(self.first_norm(self.first(images)))
        return functional.relu(self.second_norm(self.second(hidden)) + self.skip(images))


def _residual_network(config: NoiseMaskConfig, *, outputs: int) -> nn.Sequential:
    features = config.features
    return nn.Sequential(
        nn.Conv2d(config.channels, features, 3, padding=1),
        nn.ReLU(),
        _Block(features, features, stride=1),
        _Block(features, 2 * features, stride=2),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * features, outputs),
    )


class MaskPolicy(nn.Module):
    """From images to a and b of each cell, of a Beta(e^a, e^b).

    ``base`` is smoothed over steps, and images move away from it only so far.
    """

    def __init__(self, config: NoiseMaskConfig) -> None:
        super().__init__()
        self.network = _residual_network(config, outputs=2 * config.grid**2)
        self.register_buffer("base", torch.zeros(2, config.grid**2))
        self.base: Tensor

    def own(self, images: Tensor) -> Tensor:
        """Return what the network says of each image alone: [rows, 2, cells]."""
        outputs: Tensor = self.network(images)
        return outputs.view(len(images), 2, -1)

    def forward(self, images: Tensor) -> Tensor:
        """Return a and b: [rows, 2, cells], within ``LOG_PARAMETER``."""
        smoothed = (1 - OWN_SHARE) * self.base + OWN_SHARE * self.own(images)
        return smoothed.clamp(-LOG_PARAMETER, LOG_PARAMETER)

    @torch.no_grad()
    def follow(self, mean: Tensor) -> None:
        """Move the base towards the mean over a batch of ``own``: [2, cells]."""
        self.base.lerp_(mean.to(self.base.dtype), BASE_SHARE)


class NoiseMaskModel(PreTrainedModel):  # type: ignore[no-untyped-call]
    """A policy and a classifier, and how a mask comes between image and classifier."""

    config: NoiseMaskConfig
    config_class = NoiseMaskConfig
    main_input_name = "images"

    def __init__(self, config: NoiseMaskConfig) -> None:
        super().__init__(config)
        self.policy = MaskPolicy(config)
        self.classifier = _residual_network(config, outputs=config.classes)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Leave torch's own initial values."""

    def masked(self, images: Tensor, masks: Tensor) -> Tensor:
        """Multiply each image with its mask, [rows, cells], stretched over it and blurred."""
        grid = masks.reshape(-1, 1, self.config.grid, self.config.grid)
        return images * self._blurred(functional.interpolate(grid, size=images.shape[2:]))

    def forward(self, images: Tensor, masks: Tensor | None = None) -> Tensor:
        """Return the classifier's logits for images, [rows, classes], or for what masks leave of them."""
        logits: Tensor = self.classifier(images if masks is None else self.masked(images, masks))
        return logits

    def _blurred(self, fields: Tensor) -> Tensor:
        reach = self.config.blur_kernel // 2
        if not reach:
            return fields
        places = torch.arange(-reach, reach + 1, dtype=fields.dtype, device=fields.device)
        weights = torch.softmax(-((places / self.config.blur_sigma) ** 2) / 2, dim=0)
        padded = functional.pad(fields, (reach,) * 4, mode="reflect")
        across = functional.conv2d(padded, weights.view(1, 1, 1, -1))
        return functional.conv2d(across, weights.view(1, 1, -1, 1))


class NoiseMaskClassifier(PreTrainedModel):  # type: ignore[no-untyped-call]
    """The classifier alone: the policy in a directory of both is dropped."""

    config: NoiseMaskConfig
    config_class = NoiseMaskConfig
    main_input_name = "images"
    _keys_to_ignore_on_load_unexpected = [r"^policy\."]  # noqa: RUF012

    def __init__(self, config: NoiseMaskConfig) -> None:
        super().__init__(config)
        self.classifier = _residual_network(config, outputs=config.classes)
        self.post_init()  # type: ignore[no-untyped-call]

    def _init_weights(self, module: nn.Module) -> None:
        """Leave torch's own initial values."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits for images, [rows, channels, height, width] in [0, 1]: [rows, classes]."""
        logits: Tensor = self.classifier(images)
        return logits


AutoConfig.register(NoiseMaskConfig.model_type, NoiseMaskConfig, exist_ok=True)

# Logprobs and rewards are float32's on every device: cuDNN would round what it convolves to ten bits.
torch.backends.cudnn.allow_tf32 = False


def read_prompts(prompts: Tensor, config: NoiseMaskConfig) -> tuple[Tensor, Tensor]:
    """Return images, [rows, channels, height, width] in [0, 1], and labels of [rows, 1 + pixels]."""
    images = prompts[:, 1:].reshape(-1, config.height, config.width, config.channels)
    # With channels last, a 1 x 1 convolution of stride 2 over few channels writes beyond its memory on a CPU
    # (torch 2.13, backward).
    return images.permute(0, 3, 1, 2).contiguous() / (LEVELS - 1), prompts[:, 0].long()


def log_density(actions: Tensor, parameters: Tensor) -> Tensor:
    """Return the log-density of each action under Beta(e^a, e^b), nats.

    Args:
        actions: [..., cells], in [0, 1]; those at an end count as ``EDGE`` away from it.
        parameters: [..., 2, cells], a and b.
    Returns:
        [..., cells]; carries the gradient of ``parameters``.
    """
    a, b = parameters.exp().unbind(-2)
    held = actions.clamp(EDGE, 1 - EDGE)
    normaliser = torch.lgamma(a + b) - torch.lgamma(a) - torch.lgamma(b)
    return (a - 1) * held.log() + (b - 1) * torch.log1p(-held) + normaliser


def make_directory(directory: Path, config: NoiseMaskConfig, *, seed: int) -> Path:
    """Save a new policy and classifier with random weights, and a tokenizer whose words are numbers."""
    tokenizer = Tokenizer(models.WordLevel({str(number): number for number in range(config.vocab_size)}, "0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(directory)  # type: ignore[no-untyped-call]
    GenerationConfig().save_pretrained(directory)  # type: ignore[no-untyped-call]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        NoiseMaskModel(config).save_pretrained(directory)
    return directory
