"""Rows travel with leases: a real coordinator with data, and a sampler driven by hand."""

import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from node.errors import ConfigError
from node.values.limits import LEASED_ROWS_BYTES
from support.hub import RunningHub, running_hub
from support.identity import MadeRun
from support.refusals import misconfigured
from support.waiting import eventually

LONG = {"prompt": "x" * 200_000, "answer": "x"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write(tmp_path / "sums.jsonl", *({"prompt": f"{n}+1=", "answer": n + 1} for n in range(10)))


def write(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(data: Path, *, evaluation_rows: int = 2) -> dict[str, Any]:
    return {"task": "jsonl", "prompts": None, "data": {"file": data, "evaluation_rows": evaluation_rows}}


def overwrite(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b"+1=", b"+2="))


async def leased(hub: RunningHub, wanted: int) -> dict[int, dict[str, Any]]:
    """Join as learner and sampler; return the rows leased, by their prompt."""
    async with hub.peer() as learner, hub.peer(hub.made.sampler) as sampler:
        await learner.join()
        answer = await sampler.join()
        await sampler.join(prompts=answer.prompts)
        await learner.drain()
        leases = (await sampler.lease(wanted)).leases
        return {lease.prompt_index: json.loads(lease.row) for lease in leases}


async def test_every_lease_carries_its_row_and_none_is_held_out(made: MadeRun, data: Path) -> None:
    async with running_hub(made, **settings(data), task_options={"grader": "number"}) as hub:
        async with hub.peer(made.sampler) as sampler:
            answer = await sampler.join()
        assert (answer.prompts, json.loads(answer.task_options_json)) == (8, {"grader": "number"})
        rows = await leased(hub, 4)
    assert rows == {n: {"prompt": f"{n}+1=", "answer": n + 1} for n in rows}
    assert len(rows) == 4
    assert max(rows) < 8


async def test_an_answer_holds_few_rows_where_they_are_long(made: MadeRun, tmp_path: Path) -> None:
    long = write(tmp_path / "long.jsonl", *(LONG for _ in range(40)))
    async with running_hub(made, **settings(long), max_staleness_versions=100) as hub:
        rows = await leased(hub, 40)
    assert len(rows) == LEASED_ROWS_BYTES // len(json.dumps(LONG)) == 20


async def test_a_run_keeps_its_rows_once_it_has_leased(made: MadeRun, data: Path, tmp_path: Path) -> None:
    shorter = write(tmp_path / "shorter.jsonl", *({"prompt": f"{n}+1=", "answer": 1} for n in range(5)))
    async with running_hub(made, **settings(shorter)):
        pass
    async with running_hub(made, **settings(data)) as hub:  # nothing was leased of the other one
        await leased(hub, 1)
    async with running_hub(made, **settings(data)):
        pass
    for changes in (settings(shorter), settings(data, evaluation_rows=0), {"task": "addition"}):
        with misconfigured("10 rows", "evaluation_rows", key="coordinator.data"):
            async with running_hub(made, **changes):
                pass


@pytest.mark.parametrize("option", ["prompt", "messages", "answer"])
async def test_a_column_that_the_rows_lack_stops_the_start(made: MadeRun, data: Path, option: str) -> None:
    said = rf"task_options.{option} = 'sum'.*sums\.jsonl has no such column: its first row has prompt, answer"
    with pytest.raises(ConfigError, match=said):
        async with running_hub(made, **settings(data), task_options={option: "sum"}):
            pass


async def test_rows_overwritten_under_a_run_are_not_leased(made: MadeRun, data: Path) -> None:
    async with running_hub(made, **settings(data)) as hub:
        overwrite(data)
        with pytest.raises(grpc.aio.AioRpcError, match=r"of sums\.jsonl cannot be read: it was changed"):
            await leased(hub, 2)
        async with hub.peer() as learner:

            async def none_is_leased() -> bool:
                return not (await learner.status()).slots.get("leased")

            await eventually(none_is_leased)  # the refusal does not wait for the ledger
