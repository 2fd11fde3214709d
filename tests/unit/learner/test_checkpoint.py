import contextlib
import errno
import itertools
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from learner.journal.checkpoint import CheckpointStore
from learner.journal.checkpoint_index import newest_index, versions_in
from learner.journal.progress import Progress
from learner.journal.restart import JournalPlace
from learner.model.model import load_policy
from learner.objective.entropy_switch import EntropySwitch
from learner.publishing.signer import raise_epoch
from learner.step.train_step import train_step
from learner.step_log import RollbackLine, StepLine, StepLog, TrainedGroup
from node.system.sealed import sealed, unsealed
from node.values.groups.rollout import RolloutGroup
from node.values.run import StepRecord, StepReport
from support.checkpoints import open_checkpoints, origin_of, restore, save
from support.groups import make_completion, make_group
from support.refusals import cannot_start
from support.step_lines import make_step_line
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model

SETTINGS = make_step_settings(staleness_half_life_versions=4.0, micro_batch_tokens=64)


class Life:
    """A learner's policy and optimizer, and its checkpoints in a directory."""

    def __init__(self, model_dir: Path, directory: Path, **options: int) -> None:
        self.policy = load_policy(model_dir, device="cpu")
        self.optimizer = torch.optim.AdamW(self.policy.parameters.values(), lr=1e-2, fused=True)
        self.store = open_checkpoints(directory, self.policy, **options)

    def step(self, version: int) -> None:
        completions = (make_completion(3 + version % 3, reward=1.0), make_completion(4))
        groups: Sequence[RolloutGroup] = [make_group(completions=completions)]
        assert train_step(self.policy, self.optimizer, groups, version=version, settings=SETTINGS).is_applied

    def save(self, progress: Progress, place: JournalPlace | None = None) -> None:
        save(self.store, self.policy, self.optimizer, progress, place or JournalPlace())

    def restore(self) -> tuple[Progress, JournalPlace]:
        return restore(self.store, self.policy, self.optimizer)

    @property
    def parameters(self) -> torch.Tensor:
        return torch.cat([tensor.detach().flatten() for tensor in self.policy.tensors.values()])


Begin = Callable[..., Life]


@pytest.fixture
def begin(model_dir: Path, tmp_path: Path) -> Begin:
    return partial(Life, model_dir, tmp_path)


def step_line(version: int) -> StepLine:
    return make_step_line(version, at_s=1.5, groups=(TrainedGroup("4.1", "sampler-a", 1),))


def test_a_restored_learner_takes_the_next_step_bit_for_bit(begin: Begin) -> None:
    life = begin()
    for version in range(3):
        life.step(version)
    progress = Progress(
        version=3,
        step=step_line(3),
        unacknowledged=(StepRecord(2, ("3.1",), (0,)), StepRecord(3, ("4.1",), (1,))),
        trained_slots=((3, 4),),
        entropy_switch=EntropySwitch(threshold=math.inf).observe(1.5),
    )
    place = JournalPlace(7, "ab" * 16)
    life.save(progress, place)
    restored = begin()
    assert restored.restore() == (progress, place)
    assert restored.store.places() == [place]
    for version in (3, 4):
        life.step(version)
        restored.step(version)
        assert torch.equal(life.parameters, restored.parameters)


def test_without_a_checkpoint_training_begins_at_version_zero(begin: Begin) -> None:
    life = begin()
    before = life.parameters
    assert life.restore() == (Progress(0), JournalPlace())
    assert torch.equal(life.parameters, before)


def test_the_newest_two_checkpoints_are_kept_and_the_masters_of_every_nth_version(
    begin: Begin, tmp_path: Path
) -> None:
    life = begin(keep_every_versions=4)
    life.step(0)
    for version in (8, 9, 10, 11):
        life.save(Progress(version), JournalPlace(version))
    assert versions_in(tmp_path) == [8, 10, 11]
    assert [place.next_entry for place in life.store.places()] == [10, 11]
    assert sorted(path.name for path in (tmp_path / "000000000008").iterdir()) == ["index.json", "masters"]
    assert life.restore()[0].version == 11


def test_a_second_checkpoint_of_a_version_replaces_only_its_progress(begin: Begin) -> None:
    life = begin()
    life.save(Progress(3))
    again = Progress(3, recent_rewards=(0.5, math.inf))
    life.save(again, JournalPlace(2))
    assert life.restore() == (again, JournalPlace(2))


def test_a_checkpoint_that_was_only_begun_is_removed(begin: Begin, tmp_path: Path) -> None:
    begin().save(Progress(1))
    (tmp_path / "staged-000000000002" / "masters").mkdir(parents=True)
    (tmp_path / "staged-000000000002" / "masters" / "x.safetensors").write_bytes(b"half")
    life = begin()
    assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    life.save(Progress(2))
    assert life.restore()[0].version == 2


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *product(["masters", "optimizer"], ["flip", "cut", "remove", "add"]),
        *product(["index.json"], ["flip", "cut", "remove"]),
    ],
)
def test_a_damaged_checkpoint_is_refused_by_file_and_the_one_before_it_is_the_way_out(
    begin: Begin, tmp_path: Path, part: str, damage: str
) -> None:
    life = begin()
    for version in (1, 2):
        life.step(version)
        life.save(Progress(version))
    path = tmp_path / "000000000002" / part
    if path.is_dir():
        [path] = path.iterdir()
    content = path.read_bytes()
    match damage:
        case "flip":
            path.write_bytes(bytes([content[0] ^ 1]) + content[1:])
        case "cut":
            path.write_bytes(content[:-1])
        case "remove":
            path.unlink()
        case "add":
            path = path.with_name("more.safetensors")
            path.write_bytes(content)
    with cannot_start(path.name) as caught:
        life.restore()
    assert "goes on from the checkpoint before it" in str(caught.value.fix)
    shutil.rmtree(tmp_path / "000000000002")
    assert begin().restore()[0].version == 1


def test_no_flipped_bit_of_an_index_is_loaded_and_an_index_of_older_software_is(
    begin: Begin, tmp_path: Path
) -> None:
    life = begin()
    life.save(Progress(1, trained_slots=((0, 12), (14, 900))))
    path = tmp_path / "000000000001" / "index.json"
    whole = path.read_bytes()
    for at in range(len(whole)):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        with cannot_start("index.json"):
            newest_index(tmp_path)
    path.write_text(json.dumps(unsealed(whole) | {"format": 2}))
    assert life.restore()[0].trained_slots == ((0, 12), (14, 900))
    life.save(Progress(1))
    assert unsealed(path.read_bytes(), must_be_sealed=True)["format"] == 4


_OF_REPORT = [field.name for field in fields(StepReport)]
_OF_FIGURES = [name for name in make_step_line(1).numbers.batch.__slots__ if name not in _OF_REPORT]


@pytest.mark.parametrize(
    "line", [step_line(1), RollbackLine(version=1, at_s=2, step_s=1, restored_version=0)]
)
def test_the_newest_step_of_older_software_is_read_from_its_index(
    begin: Begin, tmp_path: Path, line: StepLine | RollbackLine
) -> None:
    life = begin()
    life.save(Progress(1, line))
    path = tmp_path / "000000000001" / "index.json"
    index = unsealed(path.read_bytes())
    flat = {"recommended_staleness": None} | json.loads(line.to_json())
    older = flat | {"report": {name: flat.get(name) for name in _OF_REPORT}, "figures": None}
    if isinstance(line, StepLine):
        older["figures"] = {name: flat[name] for name in _OF_FIGURES}
    for name in (*_OF_REPORT, *_OF_FIGURES):
        older.pop(name, None)
    index["progress"]["step"] = older
    path.write_bytes(sealed(json.dumps(index | {"format": 3})))
    assert life.restore()[0].step == line


def test_a_checkpoint_of_another_model_or_run_is_refused(begin: Begin, tmp_path: Path) -> None:
    life = begin()
    life.save(Progress(1))
    other = Life(make_tiny_model(tmp_path / "other", hidden=32, layers=2), tmp_path)
    with cannot_start("layout_digest"):
        other.restore()
    life.store = CheckpointStore(tmp_path, origin=replace(origin_of(life.policy), run_id="another"))
    with cannot_start("run_id", "another"):
        life.restore()


def test_checkpoints_from_before_the_journal_are_refused(begin: Begin, tmp_path: Path) -> None:
    (tmp_path / "000000000007").mkdir()
    (tmp_path / "000000000007" / "progress.json").write_text("{}")
    with cannot_start("000000000007"):
        begin().restore()


def test_the_epoch_is_higher_at_every_start(tmp_path: Path) -> None:
    assert [raise_epoch(tmp_path / "epoch") for _ in range(3)] == [1, 2, 3]
    (tmp_path / "epoch").write_text("")
    with cannot_start("epoch"):
        raise_epoch(tmp_path / "epoch")
    (tmp_path / "epoch").write_text("1\n")
    with cannot_start("epoch 1", "epoch 3"):
        raise_epoch(tmp_path / "epoch", published=3)
    assert (tmp_path / "epoch").read_text() == "1\n"


def test_every_step_has_one_line_whenever_the_learner_was_killed(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.catch_up(None)
    log.append(step_line(1))
    log.catch_up(step_line(1))  # killed after the line
    log.catch_up(step_line(2))  # killed between journal and line
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write(step_line(3).to_json()[:20])  # killed within the line
    log.catch_up(step_line(3))
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert lines == [step_line(version).to_json() for version in (1, 2, 3)]
    with cannot_start("step 3", "step 2"):
        log.catch_up(step_line(2))


def test_a_disk_that_fails_at_any_call_leaves_nothing_behind_and_takes_the_checkpoint_later(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    life = begin()
    life.step(0)
    life.save(Progress(1))
    life.step(1)
    for number in range(1, 100):
        with (
            monkeypatch.context() as patched,
            failing_at(number, errno.ENOSPC, patched) as failed,
            contextlib.suppress(OSError),
        ):
            life.save(Progress(2))
            if not failed:
                break
            shutil.rmtree(tmp_path / "000000000002")  # a directory that was there already
        assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    assert number > 10
    assert versions_in(tmp_path) == [1, 2]
    restored = begin()
    assert restored.restore()[0].version == 2
    assert torch.equal(restored.parameters, life.parameters)


@contextmanager
def failing_at(number: int, error: int, patched: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Let the n-th change of the disk fail, as many of them as there are; yield those that did."""
    failed: list[str] = []
    calls = itertools.count(1)

    def fail(name: str, call: Callable[..., object]) -> Callable[..., object]:
        def failing(*arguments: object, **options: object) -> object:
            if next(calls) == number:
                failed.append(name)
                raise OSError(error, os.strerror(error))
            return call(*arguments, **options)

        return failing

    for name in ("mkdir", "replace", "fsync"):
        patched.setattr(os, name, fail(name, getattr(os, name)))
    patched.setattr(Path, "open", fail("open", Path.open))
    yield failed
