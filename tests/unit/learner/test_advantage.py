import pytest
import torch

from learner.objective.advantage import centred_advantage


def test_rewards_are_centred_on_the_mean_of_their_group() -> None:
    reward = torch.tensor([1.0, 0.0, 0.0, 1.0], dtype=torch.float64)
    expected = torch.tensor([0.5, -0.5, -0.5, 0.5], dtype=torch.float64)
    assert torch.equal(centred_advantage(reward), expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, -7.3, 1e6])
@pytest.mark.parametrize("size", [1, 3, 7])
def test_equal_rewards_give_exactly_zero(value: float, size: int) -> None:
    assert torch.equal(centred_advantage(torch.full((size,), value)), torch.zeros(size))


@pytest.mark.parametrize("shape", [(0,), (2, 2), ()])
def test_what_is_not_one_group_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape"):
        centred_advantage(torch.zeros(shape))
