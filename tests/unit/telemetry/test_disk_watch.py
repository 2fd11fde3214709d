"""The room left for the state directory is a metric from the first moment."""

import asyncio
import shutil
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from node.telemetry.disk_watch import DiskWatch
from node.telemetry.metrics import NodeMetrics
from support.clock import ManualClock


@pytest.mark.parametrize("folder", ["", "not/made/yet"])
async def test_free_disk_is_known_when_the_service_is_ready(tmp_path: Path, folder: str) -> None:
    registry = CollectorRegistry()
    watch = DiskWatch(
        tmp_path / folder, metrics=NodeMetrics(registry, roles=["sampler"], clock=ManualClock(0.0))
    )
    stopping = asyncio.Event()

    def ready() -> None:
        ratio = registry.get_sample_value("heterorl_node_disk_free_ratio")
        free_bytes = registry.get_sample_value("heterorl_node_disk_free_bytes") or 0
        usage = shutil.disk_usage(tmp_path)
        assert ratio == pytest.approx(usage.free / usage.total, abs=0.05)
        assert 0 < free_bytes <= usage.total
        stopping.set()

    async with asyncio.timeout(10):
        await watch.run(ready=ready, stopping=stopping)
    assert stopping.is_set()


async def test_a_folder_that_cannot_be_looked_at_is_said_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    registry = CollectorRegistry()
    metrics = NodeMetrics(registry, roles=["sampler"], clock=ManualClock(0.0))
    stopping = asyncio.Event()
    async with asyncio.timeout(10):
        await DiskWatch(tmp_path / "file" / "below", metrics=metrics).run(
            ready=stopping.set, stopping=stopping
        )
    assert {record.message for record in caplog.records} == {"free disk not known"}
