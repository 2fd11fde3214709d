import contextlib
import errno
import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from learner.objective.slow_fast import EntropySwitch
from learner.publishing.signer import raise_epoch
from learner.step_log import StepLine, StepLog, TrainedGroup
from learner.training import checkpoint
from learner.training.checkpoint import BestVersion, CheckpointStore, Progress, best_in, versions_in
from learner.training.model import Policy, load_policy
from learner.training.train_step import train_step
from node import durable
from node.errors import StartupError
from node.rollout import RolloutGroup
from node.run import StepRecord, StepReport
from support.groups import make_completion, make_group
from support.step_settings import make_step_settings
from support.tiny_model import make_tiny_model

SETTINGS = make_step_settings(staleness_half_life_versions=4.0, micro_batch_tokens=64)


def learner(model_dir: Path) -> tuple[Policy, torch.optim.Optimizer]:
    policy = load_policy(model_dir, device="cpu")
    return policy, torch.optim.AdamW(policy.parameters.values(), lr=1e-2, fused=True)


def step(policy: Policy, optimizer: torch.optim.Optimizer, version: int) -> None:
    completions = (make_completion(3 + version % 3, reward=1.0), make_completion(4))
    groups: Sequence[RolloutGroup] = [make_group(completions=completions)]
    assert train_step(policy, optimizer, groups, version=version, settings=SETTINGS).is_applied


def step_line(version: int) -> StepLine:
    numbers = dict.fromkeys(StepReport.__dataclass_fields__, 0.25)
    others: dict[str, object] = {
        "version": version,
        "staleness_max_versions": 1,
        "recommended_staleness": None,
        "grader_metrics": {},
    }
    report = StepReport(**{**numbers, **others})  # type: ignore[arg-type]
    return StepLine(at_s=1.5, report=report, tokens=9, groups=(TrainedGroup("4.1", "sampler-a", 1),))


def parameters_of(policy: Policy) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in policy.tensors.values()])


def test_a_restored_learner_takes_the_next_step_bit_for_bit(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer = learner(model_dir)
    for version in range(3):
        step(policy, optimizer, version)
    progress = Progress(
        version=3,
        step=step_line(3),
        unacknowledged=(StepRecord(2, ("3.1",), (0,)), StepRecord(3, ("4.1",), (1,))),
        trained_slots=((3, 4),),
        entropy_switch=EntropySwitch(threshold=math.inf).observe(1.5),
    )
    CheckpointStore(tmp_path / "checkpoints").save(policy, optimizer, progress)
    restored, restored_optimizer = learner(model_dir)
    assert CheckpointStore(tmp_path / "checkpoints").restore(restored, restored_optimizer) == progress
    for version in (3, 4):
        step(policy, optimizer, version)
        step(restored, restored_optimizer, version)
        assert torch.equal(parameters_of(policy), parameters_of(restored))


def test_without_a_checkpoint_training_begins_at_version_zero(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer = learner(model_dir)
    before = parameters_of(policy)
    assert CheckpointStore(tmp_path).restore(policy, optimizer) == Progress(version=0)
    assert torch.equal(parameters_of(policy), before)


def test_the_newest_two_checkpoints_are_kept(model_dir: Path, tmp_path: Path) -> None:
    store, (policy, optimizer) = CheckpointStore(tmp_path), learner(model_dir)
    for version in (8, 9, 10, 11):
        store.save(policy, optimizer, Progress(version=version))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000010", "000000000011"]
    assert store.restore(policy, optimizer).version == 11


def test_the_masters_of_the_best_version_and_of_the_one_under_evaluation_are_kept_while_they_are(
    model_dir: Path, tmp_path: Path
) -> None:
    store, (policy, optimizer) = CheckpointStore(tmp_path), learner(model_dir)
    kept = []
    for version, best, evaluating in (
        (1, BestVersion(1, 0.5), None),
        (2, BestVersion(1, 0.5), None),
        (3, BestVersion(1, 0.5), None),
        (4, BestVersion(1, 0.5), None),
        (5, BestVersion(1, 0.5), 3),  # heard of while 2, 4 and 5 were made
        (6, BestVersion(1, 0.5), 3),
        (7, BestVersion(1, 0.5), 3),
        (8, BestVersion(3), None),
        (9, BestVersion(3), 6),
        (10, BestVersion(6), None),
    ):
        told = Progress(version, best=best, evaluating_version=evaluating, announced_version=version - 1)
        store.save(policy, optimizer, told)
        kept.append(versions_in(tmp_path))
    assert kept[:4] == [[1], [1, 2], [1, 2, 3], [1, 3, 4]]
    assert kept[4:7] == [[1, 3, 4, 5], [1, 3, 4, 5, 6], [1, 3, 4, 5, 6, 7]]
    assert kept[7:] == [[3, 5, 6, 7, 8], [3, 6, 7, 8, 9], [6, 7, 8, 9, 10]]
    assert best_in(tmp_path) == BestVersion(6)
    whole = [path.parent.name for path in tmp_path.glob("*/optimizer.safetensors")]
    assert sorted(whole) == ["000000000009", "000000000010"]
    assert store.restore(policy, optimizer).best == BestVersion(6)


def test_versions_made_since_the_last_heartbeat_are_kept_until_it_is_known_which_one_is_evaluated(
    model_dir: Path, tmp_path: Path
) -> None:
    store, (policy, optimizer) = CheckpointStore(tmp_path), learner(model_dir)
    for version in range(1, 31):  # a heartbeat each ten steps
        heard = version // 10 * 10
        evaluating, best = {0: (0, None), 10: (4, 0), 20: (17, 4), 30: (None, 17)}[heard]
        told = Progress(
            version,
            best=None if best is None else BestVersion(best),
            evaluating_version=evaluating,
            announced_version=max(0, heard - 1),
        )
        store.save(policy, optimizer, told)
        assert {evaluating, best, *range(max(1, heard), version)} - {None, 0} <= set(versions_in(tmp_path))
    assert versions_in(tmp_path) == [17, 27, 28, 29, 30]


@pytest.mark.parametrize(("limit", "value"), [("_FURTHER_KEPT", 0), ("_FURTHER_KEPT_BYTES", 1)])
def test_a_coordinator_that_is_not_heard_of_does_not_fill_the_disk_with_versions(
    model_dir: Path, tmp_path: Path, limit: str, value: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, limit, value)
    store, (policy, optimizer) = CheckpointStore(tmp_path), learner(model_dir)
    for version in range(1, 11):
        store.save(policy, optimizer, Progress(version, evaluating_version=0, announced_version=1))
    assert versions_in(tmp_path) == [7, 8, 9, 10]


def test_a_checkpoint_that_was_only_begun_is_passed_over(model_dir: Path, tmp_path: Path) -> None:
    policy, optimizer = learner(model_dir)
    CheckpointStore(tmp_path).save(policy, optimizer, Progress(version=1))
    (tmp_path / "staged-000000000002").mkdir()
    (tmp_path / "staged-000000000002" / "model.safetensors").write_bytes(b"half")
    store = CheckpointStore(tmp_path)
    assert store.restore(policy, optimizer).version == 1
    store.save(policy, optimizer, Progress(version=2))
    assert store.restore(policy, optimizer).version == 2


@pytest.mark.parametrize("file_name", ["model.safetensors", "optimizer.safetensors", "progress.json"])
@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_is_not_taken_instead(
    model_dir: Path, tmp_path: Path, file_name: str, damage: str
) -> None:
    policy, optimizer = learner(model_dir)
    store = CheckpointStore(tmp_path)
    for version in (1, 2):
        step(policy, optimizer, version)
        store.save(policy, optimizer, Progress(version=version))
    path = tmp_path / "000000000002" / file_name
    content = bytearray(path.read_bytes())
    content[0] ^= 1
    match damage:
        case "flip":
            path.write_bytes(content)
        case "cut":
            path.write_bytes(path.read_bytes()[:-1])
        case _:
            path.unlink()
    with pytest.raises(StartupError, match="damaged"):
        store.restore(policy, optimizer)


def test_a_checkpoint_of_another_model_is_refused(model_dir: Path, tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    store.save(*learner(model_dir), Progress(version=1))
    other = make_tiny_model(tmp_path / "other", hidden=32, layers=2)
    with pytest.raises(StartupError, match="another model"):
        store.restore(*learner(other))


def test_the_epoch_is_higher_at_every_start(tmp_path: Path) -> None:
    assert [raise_epoch(tmp_path / "epoch") for _ in range(3)] == [1, 2, 3]
    (tmp_path / "epoch").write_text("")
    with pytest.raises(StartupError, match="epoch"):
        raise_epoch(tmp_path / "epoch")


def test_every_step_has_one_line_whenever_the_learner_was_killed(tmp_path: Path) -> None:
    log = StepLog(tmp_path / "steps.jsonl")
    log.catch_up(None)
    log.append(step_line(1))
    log.catch_up(step_line(1))  # killed after the line
    log.catch_up(step_line(2))  # killed between checkpoint and line
    with (tmp_path / "steps.jsonl").open("a") as file:
        file.write(step_line(3).to_json()[:20])  # killed within the line
    log.catch_up(step_line(3))
    lines = (tmp_path / "steps.jsonl").read_text().splitlines()
    assert lines == [replace(step_line(version), at_s=1.5).to_json() for version in (1, 2, 3)]


@pytest.mark.parametrize("error", sorted(durable.DISK_ERRORS), ids=errno.errorcode.__getitem__)
def test_a_disk_that_fails_at_any_call_leaves_nothing_behind_and_takes_the_checkpoint_later(
    model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    policy, optimizer = learner(model_dir)
    store = CheckpointStore(tmp_path)
    step(policy, optimizer, 0)
    store.save(policy, optimizer, Progress(1))
    step(policy, optimizer, 1)
    before = parameters_of(policy)
    for number in range(1, 100):
        with monkeypatch.context() as patched, failing_at(number, error, patched) as failed:
            with contextlib.suppress(OSError):
                store.save(policy, optimizer, Progress(2))
            if not failed:
                break
        assert [path.name for path in tmp_path.iterdir()] == ["000000000001"]
    assert number > 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000000001", "000000000002"]
    policy, optimizer = learner(model_dir)
    assert CheckpointStore(tmp_path).restore(policy, optimizer).version == 2
    assert torch.equal(parameters_of(policy), before)


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
    patched.setattr("learner.training.checkpoint.save_file", fail("save_file", save_file))
    patched.setattr(checkpoint, "_blake3", fail("blake3", checkpoint._blake3))
    yield failed


@pytest.mark.parametrize("text", ["I/O error: No space left on device (os error 28)", "header too large"])
def test_a_safetensors_error_about_the_disk_becomes_an_os_error(text: str) -> None:
    expected: type[Exception] = OSError if "os error" in text else SafetensorError
    with pytest.raises(expected) as caught, checkpoint._as_os_error():
        raise SafetensorError(f"Error while serializing: {text}")
    assert getattr(caught.value, "errno", errno.ENOSPC) == errno.ENOSPC
