import pytest

from learner.training.first_fit import first_fit


def lengths_of(lengths: list[int], budget: int, at_least: int = 1) -> list[list[int]]:
    return [
        [lengths[row] for row in each] for each in first_fit(lengths, budget_tokens=budget, at_least=at_least)
    ]


def test_seven_rows_in_a_budget_of_eight() -> None:
    assert lengths_of([7, 5, 4, 3, 2, 2, 1], 8, 2) == [[7, 1], [5, 3], [4, 2, 2]]
    assert lengths_of([2, 1, 5, 7, 2, 3, 4], 8, 2) == [[7, 1], [5, 3], [4, 2, 2]]


def test_a_row_beyond_the_budget_is_alone_and_every_row_is_somewhere() -> None:
    assert lengths_of([1, 9, 8], 8) == [[9], [8], [1]]
    assert sorted(row for each in first_fit([3, 3, 1, 9], budget_tokens=4) for row in each) == [0, 1, 2, 3]


def test_there_are_as_many_micro_batches_as_asked_for_none_of_them_empty() -> None:
    assert lengths_of([1, 1, 1], 100, 3) == [[1], [1], [1]]
    with pytest.raises(ValueError, match="2 rows"):
        first_fit([1, 1], budget_tokens=8, at_least=3)
