"""Where contributors stand when a merged version arrives."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from learner.merging.formulas.overlap import masters_of_words, rebased
from learner.merging.formulas.stability import Overlap

floats32 = st.floats(width=32, min_value=-1e6, max_value=1e6)
OVERLAPS: tuple[Overlap, ...] = ("wait", "eager", "delayed")


def float64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


@given(st.lists(st.tuples(*[st.floats(-100, 100)] * 4), min_size=1, max_size=6))
def test_what_was_counted_is_taken_off_and_what_was_merged_is_put_on(
    rows: list[tuple[float, float, float, float]],
) -> None:
    columns = np.array(rows).T
    local, sent, anchor, merged = columns
    tensors = [torch.from_numpy(column.copy()) for column in columns]
    twins = {
        "wait": merged,
        "eager": merged + (local - sent),
        "delayed": merged + (local - anchor),
    }
    for overlap in OVERLAPS:
        found = rebased(*tensors, overlap=overlap)
        assert np.allclose(found.numpy(), twins[overlap], rtol=0, atol=1e-9)


def test_eager_is_parablocks_correction_by_the_mean_minus_the_own_change() -> None:
    anchor, own, others = float64(1.0, -2.0), float64(0.5, 0.25), float64(-1.5, 4.0)
    since = float64(0.125, 0.5)
    mean = (own + others) / 2
    local = rebased(anchor + own + since, anchor + own, anchor, anchor + mean, overlap="eager")
    assert torch.equal(local, anchor + own + since + mean - own)


@given(st.lists(st.tuples(floats32, floats32), min_size=1, max_size=20))
def test_a_contributor_that_is_alone_keeps_its_masters_bit_for_bit(pairs: list[tuple[float, float]]) -> None:
    local, sent = torch.tensor(pairs).T.contiguous().unbind()
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        words = sent.to(dtype)
        if not words.isfinite().all():
            continue
        merged = masters_of_words(words, sent)
        assert torch.equal(merged.view(torch.int32), sent.view(torch.int32))
        after = rebased(local, sent, torch.zeros_like(sent), merged, overlap="eager")
        assert torch.equal(after.view(torch.int32), local.view(torch.int32))


def test_entries_that_round_to_another_word_become_it() -> None:
    near = torch.tensor([1.001, 1.001, -3.0])
    words = torch.tensor([1.0, 2.0, -3.0], dtype=torch.bfloat16)
    assert masters_of_words(words, near).tolist() == [near[0].item(), 2.0, -3.0]


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_steps_taken_while_a_change_travels_are_handed_in_once(overlap: Overlap) -> None:
    """One contributor at rate 1 without momentum: after the last arrival the version has every step, once."""
    steps = iter(2.0**i for i in range(6))
    version = anchor = local = float64(0.0)
    for _ in range(3):
        local = local + next(steps)
        sent, change = local, local - anchor
        local = {"wait": sent, "eager": sent, "delayed": anchor}[overlap]
        if overlap != "wait":
            local = local + next(steps)
        version = version + change
        local, anchor = rebased(local, sent, anchor, version, overlap=overlap), version
    version = version + (local - anchor)  # what was not handed in yet
    assert version.item() == (7 if overlap == "wait" else 63)


def test_a_two_block_quadratic_is_solved_in_three_rounds() -> None:
    """Two clients solve their own block exactly, in turn; a block's mean comes a round late.

    f is the mean over clients i of |x - a_i|^2 + |y - b_i|^2, less its least value. In the third round block
    x is solved again, from its corrected value, and stays at the optimum.
    """
    own = float64(1.0, 5.0), float64(-2.0, 4.0)  # a_i and b_i of both clients
    version, local = [float64(0.0), float64(0.0)], [own[0] * 0, own[1] * 0]
    anchor = [float64(0.0), float64(0.0)]
    sent: tuple[int, Tensor] | None = None
    distances = []
    for turn in range(6):
        block = turn % 2
        local[block] = own[block].clone()
        if sent is not None:
            of, at = sent
            version[of] = version[of] + (at - anchor[of]).mean()
            merged = version[of].expand(2)
            local[of] = rebased(local[of], at, anchor[of].expand(2), merged, overlap="eager")
            anchor[of] = version[of]
        sent = (block, local[block])
        distances.append(abs((version[0] - 3).item()) + abs((version[1] - 1).item()))
    assert distances[1] > 0
    assert distances[2:] == [0, 0, 0, 0]
