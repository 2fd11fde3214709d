"""The kill laboratory's witness of merges finds what is doubled, comes back, or is not what was signed."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from bench.held_policy import HeldPolicy
from bench.kill_lab.merge_witness import Merged, MergeWitness
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from bench.shared.fed_back_encoder import FedBackEncoder
from deploy.runs.run_directory import LEARNER
from learner.journal.entry_rows import Origin
from learner.journal.progress import StepEntry
from learner.journal.restart import JournalPlace
from learner.journal.step_journal import StepJournal
from learner.merging.merge_settings import MergeSettings
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import TrainedGroup
from node.values.groups.rollout import EncodedGroup
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from support.step_lines import make_step_line
from support.weights import Learner as Weights

LAYOUT = Layout.of([TensorSpec("w", (64,))])
NAMES = ("contributor-1", "contributor-2")
SETTINGS = MergeSettings(method="diloco", outer_rate=0.5, outer_momentum=0.5)
CHANGES = (0.5, 0.25)
"""Each entry of the contributions of the first and the second contributor."""

SUMS = {0: 1.0, 1: 1.28125, 2: 1.609375}
"""Every word of each version: D = -.375; m = D, then 1.5 D; theta -= .5 (D + .5 m)."""


class World:
    """A run of which only the files are there."""

    def __init__(self, root: Path) -> None:
        stage = Stage(Plan(0, 0, samplers=(), contributors=NAMES), root, children=cast(Any, None))
        for directory in (stage.model, root / "logs", stage.state(LEARNER)):
            directory.mkdir(parents=True)
        save_file({"w": torch.ones(64).bfloat16()}, stage.model / "model.safetensors")
        self.logs = {name: root / "logs" / f"{name}.log" for name in (*NAMES, LEARNER)}
        for log in self.logs.values():
            log.touch()
        self.weights = Weights(LAYOUT, versions={n: held(n, value) for n, value in SUMS.items()})
        self.store = self.weights.store(stage.state(LEARNER) / "published")
        place = JournalPlace()
        self._journal = StepJournal(
            stage.state(LEARNER), origin=Origin("run", "00", "00"), place=place, since=place
        )
        self.witness = MergeWitness(stage, public_key=self.weights.key.public_key, log_of=self.logs)

    def merge(self, version: int, *rows: EncodedGroup, groups: tuple[str, ...] = ()) -> None:
        """Write a merge record, log it and publish its version."""
        merged = [Merged.of(row.header, row.columns) for row in rows]
        ids = groups or tuple(group_id for one in merged for group_id in one.group_ids)
        entry = StepEntry(
            line=make_step_line(version, groups=tuple(TrainedGroup(one, "sampler-1", 0) for one in ids)),
            acknowledged_version=0,
            best=None,
            entropy_switch=EntropySwitch(),
            settings={"merge": SETTINGS.model_dump()},
        )
        self._journal.append(entry, random_state=b"random", groups=rows)
        self.tell(LEARNER, event="step", version=version)
        self.weights.put(self.store, (version, version - 1))
        for name, number in (one.key for one in merged):
            self.tell(name, event="contribution handed in", number=number, version=version, steps=1)
            self.tell(name, event="contribution merged", number=number, version=version)

    def tell(self, name: str, **event: object) -> None:
        with self.logs[name].open("a") as log:
            log.write(json.dumps(event) + "\n")


def held(version: int, value: float) -> HeldPolicy:
    words: Words = torch.full((64,), value).bfloat16().view(torch.int16).numpy().view("uint16")
    return HeldPolicy.of(version, words, layout=LAYOUT)


def handed_in(which: int, number: int, *ids: str) -> EncodedGroup:
    """Return a contribution of the first or the second contributor, as a row of the journal."""
    about = {"contributor": NAMES[which], "number": number, "base_version": 0}
    steps = [{"numbers": {"tokens": 12}, "groups": [{"group_id": group_id} for group_id in ids]}]
    encoder = FedBackEncoder(SETTINGS, {"w": torch.Size([64])})
    payload = encoder.encode({"w": torch.full((64,), CHANGES[which])})
    header = json.dumps(about) + "\n" + json.dumps({"steps": steps})
    return EncodedGroup(header.encode(), payload)


def merged_twice_over(world: World) -> None:
    """Merge two contributions into each of two versions."""
    world.tell(LEARNER, event="batch dealt", contributor=NAMES[0], group_ids=["1.1", "2.1", "3.1", "4.1"])
    world.merge(1, handed_in(0, 1, "1.1"), handed_in(1, 1, "2.1"))
    world.merge(2, handed_in(0, 2, "3.1"), handed_in(1, 2, "4.1"))


def test_an_honest_run_breaks_nothing_and_every_record_is_summed_again(tmp_path: Path) -> None:
    world = World(tmp_path / "run")
    merged_twice_over(world)
    world.tell(NAMES[0], event="contribution refused, its groups are dealt again", number=3)
    world.witness.conclude()
    assert world.witness.violations == []
    assert world.witness.merges() == {
        "merge_records": 2,
        "contributions": 4,
        "versions_summed_again": 2,
        "dealt": 4,
        "dealt_again": 0,
        "told_merged": 4,
        "told_refused": 1,
    }


def in_two_records(world: World) -> None:
    world.merge(1, handed_in(0, 1, "1.1"), handed_in(1, 1, "2.1"))
    world.merge(2, handed_in(0, 2, "3.1"), handed_in(1, 2, "1.1"))


def merged_twice(world: World) -> None:
    world.merge(1, handed_in(0, 1, "1.1"), handed_in(1, 1, "2.1"))
    world.merge(2, handed_in(0, 1, "3.1"), handed_in(1, 2, "4.1"))
    world.logs[NAMES[0]].write_text("")  # it was told of one of them


def other_sum(world: World) -> None:
    world.weights.versions[1] = held(1, 1.5)
    world.merge(1, handed_in(0, 1, "1.1"), handed_in(1, 1, "2.1"))


def signed_without_a_record(world: World) -> None:
    world.weights.put(world.store, (1, 0))


def of_other_groups(world: World) -> None:
    world.merge(1, handed_in(0, 1, "1.1"), handed_in(1, 1, "2.1"), groups=("1.1", "9.1"))


def dealt_again(world: World) -> None:
    merged_twice_over(world)
    world.tell(LEARNER, event="batch dealt", contributor=NAMES[1], group_ids=["1.1"])


def told_what_is_not_so(world: World) -> None:
    merged_twice_over(world)
    world.tell(NAMES[0], event="contribution handed in", number=3, steps=1)
    world.tell(NAMES[0], event="contribution merged", number=3, version=2)


def refused_and_merged(world: World) -> None:
    merged_twice_over(world)
    world.tell(NAMES[1], event="contribution refused, its groups are dealt again", number=2)


def restored_otherwise(world: World) -> None:
    merged_twice_over(world)
    told = {"version": 2, "checkpoint_version": 0, "words": "inexact", "took_s": 0.1}
    world.tell(LEARNER, event="restored", **told)


@pytest.mark.parametrize(
    ("happens", "found"),
    [
        (in_two_records, "group 1.1 is in two records: 1 and 2"),
        (merged_twice, "contribution 1 of contributor-1 was merged twice"),
        (other_sum, "version 1 is not the sum of its contributions"),
        (signed_without_a_record, "version 1 was signed without a merge record"),
        (of_other_groups, "version 1 has other groups than its contributions"),
        (dealt_again, "group 1.1 was dealt after version 1 had it"),
        (
            told_what_is_not_so,
            "contributor-1 was told that version 2 has its contribution 3, which is in None",
        ),
        (refused_and_merged, "contributor-2 was refused contribution 2, which was merged"),
        (restored_otherwise, "1 restarts did not merge to the published words again"),
    ],
)
def test_what_breaks_a_promise_is_found_and_nothing_else(
    tmp_path: Path, happens: Callable[[World], None], found: str
) -> None:
    world = World(tmp_path / "run")
    happens(world)
    world.witness.conclude()
    assert world.witness.violations == [found]
