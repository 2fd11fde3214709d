"""The witness of the kill laboratory tells right from wrong, and reads formats as their makers write them."""

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bench.held_policy import HeldPolicy
from bench.kill_lab.instants import Instant, wait_for
from bench.kill_lab.plan import Plan
from bench.kill_lab.stage import Stage
from bench.kill_lab.truth import Model, read_artifact
from bench.kill_lab.witness import Replays, Witness
from deploy.runs.run_directory import COORDINATOR, LEARNER
from learner.journal.entry_rows import Origin
from learner.journal.progress import StepEntry
from learner.journal.restart import JournalPlace
from learner.journal.step_journal import FILE, StepJournal
from learner.objective.entropy_switch import EntropySwitch
from learner.step_log import TrainedGroup
from node.weights.format.digests import Words
from node.weights.format.layout import Layout, TensorSpec
from sampler.engines.words.model_words import ArrayWords
from sampler.versions.version_files import save_held
from support.step_lines import make_step_line
from support.weights import Learner as Weights
from support.weights import flip_bit, random_words

SPECS = (
    TensorSpec("embed", (1030, 1024)),
    TensorSpec("bias", (7,)),
    TensorSpec("head", (5, 3)),
    TensorSpec("norm", ()),
)
LAYOUT = Layout.of(SPECS)
"""A tensor of more than a frame, and small ones before and after it."""

NAME = "sampler-1"


def tensors_of(words: Words) -> dict[str, torch.Tensor]:
    return {
        span.name: torch.from_numpy(words[span.start_word : span.start_word + span.words].copy())
        .view(torch.bfloat16)
        .view(span.shape)
        for span in LAYOUT.tensors
    }


class World:
    """A run of which only the files are there."""

    def __init__(self, root: Path) -> None:
        self.weights = Weights(LAYOUT, versions={0: HeldPolicy.of(0, WORDS0, layout=LAYOUT)})
        self.stage = Stage(Plan(kills=0, seed=0, samplers=(NAME,)), root, children=cast(Any, None))
        self.log = root / "log"
        self.stage.model.mkdir(parents=True)
        self.log.touch()
        save_file(tensors_of(WORDS0), self.stage.model / "model.safetensors")
        self.state = self.stage.state(NAME)
        self.state.mkdir(parents=True)
        self.masters = self.stage.state(LEARNER) / "checkpoints" / "000000000001" / "masters"
        self.store = self.weights.store(self.stage.state(LEARNER) / "published")
        self.witness = Witness(self.stage, public_key=self.weights.key.public_key, log_of={NAME: self.log})

    def publish(self, version: int, base: int | None) -> None:
        self.weights.put(self.store, (version, base))

    def says(self, version: int, root: bytes | None = None) -> None:
        """Let the sampler say that it holds a version."""
        root = root or self.weights.versions[version].version.root
        event = {"time": "2026-11-21T10:00:00+00:00", "event": "version held"}
        with self.log.open("a") as log:
            log.write(json.dumps({**event, "version": version, "root": root.hex()}) + "\n")

    def keeps(self, version: int) -> None:
        """Let the sampler's disk have a copy of a version."""
        held = self.weights.versions[version]
        save_held(self.state / "held.words", held.version, ArrayWords(held.words), layout=LAYOUT)

    def found(self) -> list[str]:
        self.witness.conclude()
        return self.witness.violations


WORDS0 = random_words(0, layout=LAYOUT)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "run")


def test_roots_are_those_the_learner_signs_however_the_words_are_stored(tmp_path: Path) -> None:
    masters = {name: tensor.float() * 1.0009765625 for name, tensor in tensors_of(WORDS0).items()}
    save_file(masters, tmp_path / "masters")
    save_file({name: tensor.bfloat16() for name, tensor in masters.items()}, tmp_path / "rounded")
    model = Model(tmp_path / "rounded")
    words = model.words(tmp_path / "rounded")
    np.testing.assert_array_equal(model.words(tmp_path / "masters"), words)
    assert model.root(words) == HeldPolicy.of(1, words, layout=LAYOUT).version.root


def test_an_artifact_is_whole_only_where_every_payload_is_what_was_signed(world: World) -> None:
    world.publish(1, None)
    directory = world.stage.state(LEARNER) / "published" / "complete" / "1-key"
    public_key = world.weights.key.public_key
    whole = read_artifact(directory, public_key)
    assert whole is not None
    assert whole.is_whole
    flip_bit(directory / "frames", 5)
    damaged = read_artifact(directory, public_key)
    assert damaged is not None
    assert 0 < damaged.intact_bytes < whole.intact_bytes
    assert read_artifact(directory, Weights().key.public_key) is None


def test_an_honest_run_breaks_nothing_and_everything_in_it_was_looked_at(world: World) -> None:
    world.says(0)
    world.publish(1, 0)
    world.says(1)
    world.keeps(1)
    world.witness.examine(NAME)
    world.says(1)
    world.masters.mkdir(parents=True)
    save_file(tensors_of(world.weights.words(1)), world.masters / "1.safetensors")
    assert world.found() == []
    looked = world.witness.looked
    assert (looked.claims, looked.copies, looked.checkpoints, looked.starts_with_a_version) == (2, 1, 1, 1)


def unsigned_root(world: World) -> None:
    world.publish(1, 0)
    world.says(1, root=b"x" * 16)


def going_back(world: World) -> None:
    world.publish(1, 0)
    world.says(1)
    world.says(0)


def copied(world: World) -> None:
    world.publish(1, 0)
    world.keeps(1)


def less_than_the_disk_had(world: World) -> None:
    copied(world)
    world.witness.examine(NAME)
    world.says(0)


def damaged_copy(world: World) -> None:
    copied(world)
    flip_bit(world.state / "held.words", 5000)
    world.witness.examine(NAME)


def checkpoint_of_other_words(world: World) -> None:
    world.publish(1, 0)
    world.masters.mkdir(parents=True)
    save_file(tensors_of(WORDS0), world.masters / "1.safetensors")


def shard_of_another_version(world: World) -> None:
    world.publish(1, 0)
    save_in_shards(world.masters, world.weights.words(1))
    save_in_shards(other := world.masters.parent / "other", WORDS0)
    (other / "1.safetensors").replace(world.masters / "1.safetensors")


def journaled_again(world: World) -> None:
    write_journal(world, (1, "1.1"))
    world.witness.look()
    (world.stage.state(LEARNER) / FILE).unlink()
    write_journal(world, (1, "3.1"))


def signed_twice(world: World) -> None:
    world.publish(1, 0)
    world.witness.look()
    fork = Weights(LAYOUT, key=world.weights.key, versions={0: world.weights.versions[0]})
    fork.versions[1] = HeldPolicy.of(1, random_words(9, layout=LAYOUT), layout=LAYOUT)
    fork.put(fork.store(world.stage.state(COORDINATOR) / "versions"), (1, None))


@pytest.mark.parametrize(
    ("happens", "found"),
    [
        (unsigned_root, "version 1 with root"),
        (lambda world: world.says(7, root=b"x" * 16), "signed was nothing"),
        (going_back, f"{NAME} served version 0 after version 1"),
        (less_than_the_disk_had, f"{NAME} began with version 0, its disk had 1"),
        (damaged_copy, "its copy of version 1"),
        (checkpoint_of_other_words, "version 1 was signed with another root than its checkpoint has"),
        (shard_of_another_version, "version 1 was signed with another root than its checkpoint has"),
        (journaled_again, "version 1 is of other groups in the journal than before"),
        (signed_twice, "version 1 was signed with two roots"),
        (lambda world: world.publish(1, None), "version 1 was signed as a keyframe only"),
    ],
)
def test_what_breaks_a_promise_is_found_and_nothing_else(
    world: World, happens: Callable[[World], None], found: str
) -> None:
    happens(world)
    (violation,) = world.found()
    assert found in violation


def save_in_shards(masters: Path, words: Words) -> None:
    """Save masters as two ranks do: each a run of the first axis, the shorter tensors on the first alone."""
    masters.mkdir(parents=True)
    for rank in (0, 1):
        parts, offsets = {}, {}
        for name, tensor in tensors_of(words).items():
            if tensor.ndim == 0 and rank == 1:
                continue
            cut = tensor if tensor.ndim == 0 else torch.chunk(tensor, 2)[rank]
            parts[name] = cut.float().contiguous()
            first = rank * -(-tensor.shape[0] // 2) if tensor.ndim else 0
            offsets[name] = {"saved_offsets": [first, *[0] * (tensor.ndim - 1)][: tensor.ndim]}
        save_file(parts, masters / f"{rank}.safetensors", {"DCP_SHARDING_INFO": json.dumps(offsets)})


def test_a_checkpoint_of_several_ranks_is_put_together_from_their_shards(world: World) -> None:
    world.publish(1, 0)
    save_in_shards(world.masters, world.weights.words(1))
    assert world.found() == []
    assert world.witness.looked.checkpoints == 1


def write_journal(world: World, *steps: tuple[int, str]) -> None:
    directory, origin = world.stage.state(LEARNER), Origin("run", "00", "00")
    journal = StepJournal(directory, origin=origin, place=JournalPlace(), since=JournalPlace())
    for version, group_id in steps:
        groups = (TrainedGroup(group_id, "sampler", 0),)
        entry = StepEntry(
            line=make_step_line(version, groups=groups),
            acknowledged_version=0,
            best=None,
            entropy_switch=EntropySwitch(),
            settings={},
        )
        journal.append(entry, random_state=b"random")


def test_the_journal_and_the_log_say_the_same_groups_or_it_is_found(world: World) -> None:
    write_journal(world, (1, "1.1"), (2, "2.1"))
    log = world.stage.state(LEARNER) / "steps.jsonl"
    lines = [{"version": n, "groups": [{"group_id": f"{n}.{n}"}]} for n in (1, 2)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert world.found() == ["version 2 is of other groups in the log than in the journal"]
    assert world.witness.looked.journaled == 2


def test_a_moment_comes_when_a_file_appears_or_changes_and_not_otherwise(tmp_path: Path) -> None:
    appears, changes = Instant("appears", "new*"), Instant("changes", "old", is_change=True)
    old = tmp_path / "old"
    old.write_text("1")
    assert not wait_for(appears, tmp_path, timeout_s=0.01)
    assert not wait_for(changes, tmp_path, timeout_s=0.01)
    for instant, path in ((appears, tmp_path / "new1"), (changes, old)):
        threading.Timer(0.05, path.write_text, ("22",)).start()
        assert wait_for(instant, tmp_path, timeout_s=10.0)


def test_a_slot_trained_on_twice_or_a_version_missing_from_the_lineage_is_found(world: World) -> None:
    log = world.stage.state(LEARNER) / "steps.jsonl"
    lines = [{"version": n, "groups": [{"group_id": f"{n}.1"}, {"group_id": "9.2"}]} for n in (1, 3)]
    log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert world.found() == [
        "the log of steps has versions [1, 3] at its end",
        "slot 9 was trained on 2 times",
    ]


def test_restarts_are_counted_by_whether_the_published_words_came_out_again(world: World) -> None:
    log = world.stage.root / "learner.log"
    restart = {"event": "restored", "checkpoint_version": 20}
    events = [
        {**restart, "version": 25, "words": "exact", "took_s": 0.5},
        {**restart, "version": 22, "words": "inexact", "took_s": 1.5},
    ]
    log.write_text("a warning\n" + "".join(json.dumps(event) + "\n" for event in events))
    logs = {NAME: world.log, LEARNER: log}
    witness = Witness(world.stage, public_key=world.weights.key.public_key, log_of=logs)
    witness.conclude()
    assert witness.replays == Replays(exact=1, inexact=1, steps=7, longest_s=1.5)
