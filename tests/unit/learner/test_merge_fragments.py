"""Which tensors are merged in which round."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from learner.merging.formulas.fragments import Fragments

NAMES = st.text("abcdef", min_size=1, max_size=3)
MODELS = st.dictionaries(NAMES, st.integers(0, 1000), min_size=1, max_size=30)


@given(MODELS, st.integers(1, 30))
def test_every_tensor_is_of_one_fragment_and_none_is_far_above_the_mean(
    sizes: dict[str, int], count: int
) -> None:
    if count > len(sizes):
        with pytest.raises(ValueError, match="fragments"):
            Fragments.of(sizes, count=count)
        return
    names = Fragments.of(sizes, count=count).names
    assert len(names) == count
    assert sorted(name for each in names for name in each) == sorted(sizes)
    filled = [sum(sizes[name] for name in each) for each in names]
    assert max(filled) <= sum(sizes.values()) / count + max(sizes.values())
    order = list(sizes)
    assert all(list(each) == sorted(each, key=order.index) for each in names)


def test_fragments_take_turns_and_follow_from_the_model_alone() -> None:
    sizes = {"embedding": 10, "a": 4, "b": 4, "c": 4, "head": 10}
    fragments = Fragments.of(sizes, count=3)
    assert fragments.names == (("embedding",), ("head",), ("a", "b", "c"))
    assert fragments == Fragments.of(dict(sizes), count=3)
    assert [fragments.due(each) for each in range(7)] == [0, 1, 2, 0, 1, 2, 0]
