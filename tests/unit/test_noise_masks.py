"""Noise masks as completions: the densities of their cells, and what no policy of masks can have made."""

import base64
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from node.errors import Reason
from node.kinds.noise_mask.network import NoiseMaskConfig, NoiseMaskModel, log_density, read_prompts
from node.kinds.noise_mask.values import MaskSizes, as_text, read_row
from support.groups import make_completion, make_group
from support.refusals import refused

SIZES = MaskSizes(pixels=4, classes=3, cells=2)


def beta(a: float, b: float) -> Tensor:
    """Return the parameters of one cell's Beta(a, b), which ask for a gradient: [2, 1]."""
    return torch.tensor([[a], [b]], dtype=torch.float64).log().requires_grad_()


def test_the_density_of_a_cell_and_its_gradient_are_the_betas() -> None:
    """Beta(2, 3) at .4; d/d log a is a times d/da."""
    parameters = beta(2, 3)
    density = log_density(torch.tensor([0.4], dtype=torch.float64), parameters).sum()
    (gradient,) = torch.autograd.grad(density, parameters)
    assert density.item() == pytest.approx(0.546965, abs=1e-6)
    assert (gradient[:, 0] / torch.tensor([2.0, 3.0])).tolist() == pytest.approx(
        [0.167043, 0.072508], abs=1e-6
    )


@pytest.mark.parametrize("action", [0.0, 1.0])
@pytest.mark.parametrize("parameter", [-5.0, 5.0])
def test_densities_are_numbers_at_the_ends_of_every_cell(action: float, parameter: float) -> None:
    parameters = torch.full((2, 1), parameter, requires_grad=True)
    density = log_density(torch.tensor([action]), parameters).sum()
    (gradient,) = torch.autograd.grad(density, parameters)
    assert torch.isfinite(density)
    assert torch.isfinite(gradient).all()
    assert density < 30


def test_a_mask_of_ones_leaves_the_image_and_one_of_zeros_leaves_nothing() -> None:
    config = NoiseMaskConfig(height=6, width=9, channels=2, grid=3, features=4, blur_kernel=5, blur_sigma=2.0)
    model = NoiseMaskModel(config)
    images = torch.rand(2, 2, 6, 9)
    torch.testing.assert_close(model.masked(images, torch.ones(2, 9)), images)
    assert not model.masked(images, torch.zeros(2, 9)).any()
    left = torch.zeros(2, 9)
    left[:, [0, 3, 6]] = 1.0  # the left column of cells
    kept = model.masked(torch.ones_like(images), left)[0, 0, 3]
    assert kept[0] > kept[4] > kept[8]


def test_the_base_follows_the_batch_and_images_move_the_parameters_by_a_tenth() -> None:
    """New a = .9 base + .1 P(x); base <- .99 base + .01 of the batch's mean."""
    policy = NoiseMaskModel(NoiseMaskConfig(features=4)).policy
    images = torch.rand(3, 1, 8, 8)
    own = policy.own(images).detach()
    torch.testing.assert_close(policy(images), 0.1 * own)
    policy.follow(own.mean(dim=0))
    torch.testing.assert_close(policy.base, 0.01 * own.mean(dim=0))
    torch.testing.assert_close(policy(images), 0.9 * policy.base + 0.1 * own)


@pytest.mark.parametrize("kernel", [2, 17])
def test_a_blur_that_does_not_fit_the_image_is_refused(kernel: int) -> None:
    with pytest.raises(ValueError, match=f"blur_kernel is {kernel}"):
        NoiseMaskConfig(blur_kernel=kernel)


def test_an_image_is_read_as_it_was_written_channels_last() -> None:
    rows = [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]
    label, pixels = read_row(rows, 2)
    assert as_text(label, pixels) == "2 1 2 3 4 5 6 7 8"
    config = NoiseMaskConfig(height=2, width=2, channels=2, features=4)
    images, labels = read_prompts(torch.tensor([[label, *pixels]]), config)
    assert labels.tolist() == [2]
    assert (images[0] * 255).round().tolist() == [[[1, 3], [5, 7]], [[2, 4], [6, 8]]]
    packed = base64.b64encode(bytes(range(1, 9))).decode()
    assert as_text(*read_row(packed, 2)) == as_text(label, pixels)


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ([[0.5]], 0), ([[256]], 0), ([[-1]], 0), ([], 0), ([[1], [1, 2]], 0), ("%", 0), (None, 0),
        ([["a"]], 0), ([[1]], -1), ([[1]], True), ([[1]], "1"), ([[1]], None),
    ],
)  # fmt: skip
def test_what_is_no_image_with_a_label_is_refused(image: object, label: object) -> None:
    with pytest.raises(ValueError, match=r"the image is|the label is|inhomogeneous|base64"):
        read_row(image, label)


@pytest.mark.parametrize(
    "ids", [[0, 1, 2, 3], [3, 0, 0, 0, 0], [-1, 0, 0, 0, 0], [0, 0, 0, 0, 256], [0, -1, 0, 0, 0]]
)
def test_a_prompt_of_another_size_or_with_another_label_is_refused(ids: list[int]) -> None:
    with refused(Reason.MALFORMED):
        SIZES.check_prompt(np.array(ids, np.int32))


def test_a_group_that_no_policy_of_masks_can_have_made_is_named() -> None:
    real = make_completion(2, actions=np.array([0.2, 0.9], np.float32))
    group = make_group(prompt_token_ids=np.array([2, 0, 0, 0, 255], np.int32), completions=(real, real))
    assert SIZES.objection(group) is None
    wrong = {
        "completion 1 has tokens for actions": replace(real, actions=None),
        "completion 1 is a mask of 3 cells, not of 2": make_completion(3, actions=np.zeros(3, np.float32)),
        "completion 1 has cells that were not drawn": replace(real, is_drawn=np.array([True, True])),
    }
    for said, completion in wrong.items():
        assert str(SIZES.objection(replace(group, completions=(real, completion)))).startswith(said)
    assert "temperature" in str(
        SIZES.objection(replace(group, sampling=replace(group.sampling, temperature=0.5)))
    )
    assert "a prompt of 1 tokens" in str(
        SIZES.objection(replace(group, prompt_token_ids=np.array([2], np.int32)))
    )
