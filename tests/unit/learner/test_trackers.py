import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from wandb.proto import wandb_internal_pb2

from learner.records.trackers import TensorBoardWriter, WandbWriter
from learner.step_log import StepLine
from support.step_lines import make_step_line
from support.waiting import until


def step_line(version: int, **changes: Any) -> StepLine:
    return make_step_line(
        version, at_s=1000.0 + version, reward_mean=version / 8, grader_metrics={"words": 2.5}, **changes
    )


def numbers(version: int) -> dict[str, float]:
    """Return a step's numbers under the names of the metrics."""
    return {f"heterorl_learner_{name}": value for name, value in step_line(version).gauges().items()}


def write(writer: TensorBoardWriter | WandbWriter, version: int) -> None:
    assert writer.write_of(step_line(version, teaching_groups=0), ()) is None  # no step, no numbers
    written = writer.write_of(step_line(version), ())
    assert written is not None
    written()


def test_tensorboard_reads_back_every_number_of_every_step_across_a_restart(tmp_path: Path) -> None:
    for versions in ((1, 2), (3,)):
        writer = TensorBoardWriter(tmp_path / "events")
        for version in versions:
            write(writer, version)
        writer.close()
    read = EventAccumulator(str(tmp_path / "events")).Reload()
    assert set(read.Tags()["scalars"]) == numbers(1).keys()
    for name in numbers(1):
        found = {event.step: (event.value, event.wall_time) for event in read.Scalars(name)}
        assert found == {
            version: (pytest.approx(numbers(version)[name]), 1000.0 + version) for version in (1, 2, 3)
        }


def records(file: Path) -> list[wandb_internal_pb2.Record]:
    """Read a file of wandb's that fits a block of 32 KiB: 7 bytes, then checksum, length, type."""
    content, place, found = file.read_bytes(), 7, []
    while place + 7 <= len(content):
        length, kind = struct.unpack_from("<HB", content, place + 4)
        assert kind == 1  # a record that is not cut in parts
        found.append(wandb_internal_pb2.Record.FromString(content[place + 7 : place + 7 + length]))
        place += 7 + length
    return found


def history_in(file: Path) -> dict[int, dict[str, float]]:
    """Return what was logged at each step, without wandb's own."""
    return {
        record.history.step.num: {
            name: json.loads(item.value_json)
            for item in record.history.item
            if not (name := item.key or item.nested_key[0]).startswith("_")
        }
        for record in records(file)
        if record.HasField("history")
    }


def files_in(directory: Path) -> list[Path]:
    return list(directory.glob("wandb/offline-run-*/run-run-1.wandb"))


async def test_wandb_keeps_every_number_of_every_step_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    writer = WandbWriter("arithmetic", run_id="run-1", directory=tmp_path, configuration={"device": "cpu"})
    assert not files_in(tmp_path)  # nothing is begun before there is something to say
    for version in (1, 2):
        await asyncio.to_thread(write, writer, version)
    await asyncio.to_thread(writer.close)
    [file] = files_in(tmp_path)
    await until(lambda: len(history_in(file)) == 2)  # wandb's own process writes, a little later
    assert history_in(file) == {version: numbers(version) for version in (1, 2)}
    [begun] = [record.run for record in records(file) if record.HasField("run")]
    assert (begun.project, begun.run_id) == ("arithmetic", "run-1")
