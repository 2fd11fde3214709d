"""Changes coded and decoded: exact where they say so, and otherwise nothing is lost but for a while."""

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.changes.coder import change_limit_bytes, decode_tensors
from learner.merging.merge_settings import Compression
from support.changes import COMPRESSIONS, SHAPES, changed, drawn, float32_kinds, merge_settings, words_of

SEEDS = st.integers(0, 2**32 - 1)


@settings(deadline=None, max_examples=60)
@given(seed=SEEDS, nearness=st.sampled_from(["any", "near", "same"]))
def test_full_makes_the_masters_again_to_the_last_bit(seed: int, nearness: str) -> None:
    """Except where no float64 could: a master far below its anchor, or -0.0 where the anchor is not."""
    source = np.random.default_rng(seed)
    anchor = float32_kinds(5000, source)
    masters = float32_kinds(5000, source)
    if nearness == "near":
        masters = (anchor.double() * (1 + 1e-3 * torch.from_numpy(source.standard_normal(5000)))).float()
    elif nearness == "same":
        masters = anchor.clone()
    masters[~masters.isfinite()] = 0
    shapes = {"a": torch.Size([5000])}
    rules = merge_settings("full")
    payload = FedBackEncoder(rules, shapes).encode(changed({"a": masters}, {"a": anchor}))
    change = dict(decode_tensors(payload, rules, shapes))["a"]
    made = (anchor.double() + change).float()
    differs = made.view(torch.int32) != masters.view(torch.int32)
    is_far = masters.abs().double() < 2.0**-29 * anchor.abs().double()
    is_negative_zero = (masters == 0) & masters.signbit() & ~((anchor == 0) & anchor.signbit())
    assert not (differs & ~is_far & ~is_negative_zero).any()
    assert (made - masters)[is_far].abs().double().le(2.0**-53 * anchor[is_far].abs().double()).all()
    assert made[is_negative_zero].eq(0).all()
    assert len(payload) <= change_limit_bytes(rules, shapes)


@pytest.mark.parametrize("compression", COMPRESSIONS)
@settings(deadline=None, max_examples=4)
@given(seed=SEEDS, exponent=st.integers(-20, 30))
def test_what_is_left_over_is_handed_in_by_and_by(compression: Compression, seed: int, exponent: int) -> None:
    """After one change nothing else changes; every payload brings what was decoded closer to it."""
    given_in_all, nothing = drawn(seed, scale=10.0**exponent), drawn(seed, scale=0.0)
    if compression == "word_changes":
        given_in_all = drawn(seed, scale=1e-3)
    errors = _rounds(compression, [given_in_all] + 24 * [nothing])
    assert errors[0] < (1e-12 if compression == "full" else 1)
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(errors))
    if compression != "word_changes":
        assert errors[-1] < 0.02


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_over_many_rounds_of_a_constant_change_the_sum_decoded_is_the_sum_given(
    compression: Compression,
) -> None:
    step = drawn(1, scale=1e-5)
    errors = _rounds(compression, 100 * [step])
    assert errors[-1] < 0.1
    assert errors[-1] <= errors[0] + 1e-12


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_some_tensors_alone_leave_the_others_as_they_were(compression: Compression) -> None:
    rules, change, before = merge_settings(compression), drawn(1, scale=1e-2), words_of(drawn(2))
    encoder, twin = FedBackEncoder(rules, SHAPES), FedBackEncoder(rules, SHAPES)
    names = {"bias", "heads"}
    for coder in (encoder, twin):
        coder.encode(change, words_before=before)
    payload = encoder.encode({name: change[name] for name in names}, words_before=before)
    decoded = dict(decode_tensors(payload, rules, SHAPES, words_before=before))
    assert decoded.keys() == names
    whole = dict(decode_tensors(twin.encode(change, words_before=before), rules, SHAPES, words_before=before))
    assert all(torch.equal(decoded[name], whole[name]) for name in names)


def _rounds(compression: Compression, changes: Sequence[dict[str, Tensor]]) -> list[float]:
    """Hand in one change after another, each of the version that the ones before made.

    Returns:
        After each, the relative distance of the sum of what was decoded from the sum of what was given.
    """
    rules = merge_settings(compression)
    encoder, start = FedBackEncoder(rules, SHAPES), drawn(7, scale=1e-2)
    handed_in, given_in_all = [
        {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()} for _ in "12"
    ]
    errors = []
    for change in changes:
        before = words_of({name: start[name] + part for name, part in handed_in.items()})
        payload = encoder.encode(change, words_before=before)
        assert len(payload) <= change_limit_bytes(rules, SHAPES)
        for name, part in decode_tensors(payload, rules, SHAPES, words_before=before):
            handed_in[name] += part
            given_in_all[name] += change[name]
        errors.append(_distance(handed_in, given_in_all) / _norm(given_in_all))
    return errors


def _norm(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([x.double().square().sum() for x in tensors.values()]).sum().sqrt())


def _distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return _norm({name: one[name].double() - other[name].double() for name in one})
