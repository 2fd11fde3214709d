import pytest
import torch

from learner.objective.surrogate import clipped_surrogate

W = [0.5, 0.9, 1.0, 1.1, 2.0]


@pytest.mark.parametrize(
    ("advantage", "loss", "is_clipped"),
    [
        (1.0, [-0.5, -0.9, -1.0, -1.1, -1.2], [False, False, False, False, True]),
        (-1.0, [0.8, 0.9, 1.0, 1.1, 2.0], [True, False, False, False, False]),
        (0.0, [0.0] * 5, [False] * 5),
    ],
)
def test_only_moves_that_went_far_enough_are_clipped(
    advantage: float, loss: list[float], is_clipped: list[bool]
) -> None:
    weight = torch.tensor(W, dtype=torch.float64, requires_grad=True)
    surrogate = clipped_surrogate(weight, torch.full_like(weight, advantage), clip_low=0.2, clip_high=0.2)
    torch.testing.assert_close(surrogate.loss, torch.tensor(loss, dtype=torch.float64), rtol=0, atol=1e-12)
    assert surrogate.is_clipped.tolist() == is_clipped
    surrogate.loss.sum().backward()  # type: ignore[no-untyped-call]
    assert weight.grad is not None
    assert weight.grad.tolist() == [0.0 if clipped else -advantage for clipped in is_clipped]


@pytest.mark.parametrize(
    ("low", "high"),
    [(0.0, 0.2), (1.1, 0.2), (-0.2, 0.2), (0.2, 0.0), (float("nan"), 0.2), (0.2, float("nan"))],
)
def test_a_clip_out_of_range_is_refused(low: float, high: float) -> None:
    with pytest.raises(ValueError, match="clip_"):
        clipped_surrogate(torch.ones(2), torch.ones(2), clip_low=low, clip_high=high)


def test_shapes_must_agree() -> None:
    with pytest.raises(ValueError, match="shape"):
        clipped_surrogate(torch.ones(2), torch.ones(1), clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_narrower_than_float32_are_refused(dtype: torch.dtype) -> None:
    """A clip at 1.2 in bfloat16 is one at 1.203, and the ratio of two logprobs near -8 is off by 3 %."""
    with pytest.raises(ValueError, match=f"{dtype}.*float32"):
        clipped_surrogate(torch.ones(2, dtype=dtype), torch.ones(2), clip_low=0.2, clip_high=0.2)


@pytest.mark.parametrize("dual", [1.0, 0.5, float("nan")])
def test_a_dual_clip_that_would_clip_everything_is_refused(dual: float) -> None:
    with pytest.raises(ValueError, match="dual_clip"):
        clipped_surrogate(torch.ones(2), torch.ones(2), clip_low=0.2, clip_high=0.2, dual_clip=dual)
