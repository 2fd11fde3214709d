"""Contributions combined tensor by tensor, whichever tensors each has."""

from dataclasses import replace
from typing import cast

import pytest
import torch
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.changes.word_changes import WordsBefore
from learner.merging.contribution import ContributionReport, LocalStep
from learner.merging.handed_in import HandedIn
from learner.merging.merge_settings import MergeSettings
from learner.merging.outer_optimizer import MergeInputs, merged_tensors
from learner.step_log import TrainedGroup
from node.values.contribution import Contribution
from node.values.groups.rollout import EncodedGroup
from support.groups import make_group
from support.step_lines import make_step_line

SHAPES = {"b": torch.Size([3, 4]), "a": torch.Size([5]), "c": torch.Size([])}
FULL = {"method": "diloco", "compression": "full"}
NO_WORDS = cast(WordsBefore, None)


def handed_in(name: str, changes: dict[str, Tensor], settings: MergeSettings, *, groups: int = 2) -> HandedIn:
    told = tuple(TrainedGroup(f"{name}{number}", "s", 0) for number in range(groups))
    step = LocalStep(make_step_line(0, tokens=4).numbers, told, (0.0,) * groups)
    report = ContributionReport((step,) if changes else ())
    payload = FedBackEncoder(settings, SHAPES).encode(changes) if changes else b""
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
