"""Contributions combined tensor by tensor, whichever tensors each has; the cosine of each with the mean."""

from collections.abc import Mapping
from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.changes.coder import Shapes
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import Merged, MergeInputs, OuterOptimizer, merged_tensors
from learner.step_log import TrainedGroup
from node.values.contribution import Contribution
from node.values.groups.rollout import EncodedGroup
from support import changes as model
from support.groups import make_group
from support.step_lines import make_step_line

SHAPES = {"b": torch.Size([3, 4]), "a": torch.Size([5]), "c": torch.Size([])}
FULL = {"method": "diloco", "compression": "full"}
NO_WORDS = cast(WordsBefore, None)


def handed_in(
    name: str, changes: Mapping[str, Tensor], settings: MergeSettings, *, shapes: Shapes = SHAPES
) -> HandedIn:
    """Return a contribution of one step on two groups; without changes, it taught nothing."""
    told = tuple(TrainedGroup(f"{name}{number}", "s", 0) for number in range(2))
    step = LocalStep(make_step_line(0, tokens=4).numbers, told, (0.0, 0.0))
    report = ContributionReport((step,) if changes else ())
    payload = FedBackEncoder(settings, shapes).encode(changes) if changes else b""
    return HandedIn(name, Contribution.of(1, 0, report.to_json(), payload), report, tokens=8)


def merged_changes(inputs: MergeInputs) -> dict[str, Tensor]:
    return {name: change for name, change, _ in merged_tensors(inputs, SHAPES, words_before=NO_WORDS)}


def constant(value: float, *names: str) -> dict[str, Tensor]:
    return {name: torch.full(SHAPES[name], value) for name in names or SHAPES}


@pytest.mark.parametrize(("combine", "expected"), [("mean", 25.0), ("median", 2.0), ("trimmed_mean", 2.0)])
def test_each_tensor_is_combined_of_those_that_have_it(combine: str, expected: float) -> None:
    settings = MergeSettings.model_validate(FULL | {"combine": combine})
    given = [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 94.0)]
    those = [handed_in(name, constant(value), settings) for name, value in given[:3]]
    those.append(handed_in("d", constant(94.0, "a"), settings))
    merged = merged_changes(MergeInputs(those, settings))
    assert {name: change.shape for name, change in merged.items()} == SHAPES
    assert torch.allclose(merged["a"], torch.full(SHAPES["a"], {2.0: 2.5}.get(expected, expected)).double())
    for name in ("b", "c"):
        assert torch.allclose(merged[name], torch.full(SHAPES[name], 2.0).double())


def test_fragments_of_two_rounds_are_means_of_their_own() -> None:
    settings = MergeSettings.model_validate(FULL)
    those = [
        handed_in("a", constant(1.0, "a"), settings),
        handed_in("b", constant(4.0, "a"), settings),
        handed_in("c", constant(5.0, "b", "c"), settings),
        handed_in("d", {}, settings),
    ]
    merged = merged_changes(MergeInputs(those, settings))
    means = {"a": 2.5, "b": 5.0, "c": 5.0}
    assert all(torch.allclose(merged[name], torch.tensor(mean).double()) for name, mean in means.items())


def test_a_broken_payload_is_an_error_before_anything_is_made() -> None:
    settings = MergeSettings.model_validate(FULL)
    good = handed_in("a", constant(1.0), settings)
    whole = handed_in("b", constant(1.0), settings)
    broken = replace(whole, contribution=replace(whole.contribution, payload=whole.contribution.payload[:-1]))
    with pytest.raises(ValueError, match="payload"):
        merged_changes(MergeInputs([good, broken], settings))


def test_weights_go_by_tokens_that_were_dealt_and_batches_that_were_consumed() -> None:
    """Whatever a report says: the journal has the count."""
    settings = MergeSettings.model_validate(FULL)
    groups = {f"a{number}": make_group(f"{number}.1") for number in range(2)}
    drawn = sum(one.drawn_tokens for group in groups.values() for one in group.completions)
    honest = handed_in("a", constant(1.0), settings).counted(groups)
    assert (honest.worked.tokens, honest.worked.groups) == (drawn, 2)
    row = honest.journalled()
    again = HandedIn.of_journal(EncodedGroup(row.header, row.columns))
    assert again.worked == honest.worked


def merged(*changes: Mapping[str, Tensor]) -> Merged:
    """Merge contributions of equal weight, named c0, c1, ..."""
    masters = {name: torch.zeros(shape) for name, shape in model.SHAPES.items()}
    settings = MergeSettings(method="in_step")
    those = [
        handed_in(f"c{number}", change, settings, shapes=model.SHAPES)
        for number, change in enumerate(changes)
    ]
    return OuterOptimizer(masters).merge(MergeInputs(those, settings), model.words_of(masters))


def flat(change: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([change[name].double().flatten() for name in sorted(change)])


def along(place: int, size: float) -> dict[str, Tensor]:
    return {"bias": torch.eye(7)[place] * size}


def test_cosines_are_those_of_whole_changes_with_their_mean() -> None:
    changes = [model.drawn(seed, scale=1.0 + seed) for seed in range(3)]
    mean = torch.stack([flat(one) for one in changes]).mean(0)
    found = merged(*changes)
    assert found.norm == pytest.approx(float(mean.norm()))
    for number, change in enumerate(changes):
        cosine = torch.nn.functional.cosine_similarity(flat(change), mean, dim=0)
        assert found.cosines[f"c{number}"] == pytest.approx(float(cosine))
    assert found.numbers["merged_cosine_min"] == min(found.cosines.values())


@pytest.mark.parametrize(
    ("changes", "cosines"),
    [
        ((along(0, 1.0), along(1, 1.0)), (0.5**0.5, 0.5**0.5)),
        ((along(0, 3.0), along(0, -1.0)), (1.0, -1.0)),
        ((along(0, 1.0), along(0, -1.0)), (0.0, 0.0)),
        ((along(0, 1.0), along(0, 0.0)), (1.0, 0.0)),
        ((along(0, 1.0), {"gain": torch.tensor(2.0)}), (1.0, 1.0)),
    ],
    ids=["right angles", "against", "none is left", "a zero", "two fragments"],
)
def test_cosines_worked_by_hand(
    changes: tuple[Mapping[str, Tensor], ...], cosines: tuple[float, ...]
) -> None:
    assert tuple(merged(*changes).cosines.values()) == pytest.approx(cosines)


def test_one_contribution_alone_has_no_cosine() -> None:
    one = model.drawn(1)
    assert merged(one).cosines == merged(one, {}).cosines == {}
    assert merged(one, {}).contributions == 1
    assert merged(one).numbers["merged_cosine_min"] is None
