"""A run whose grader is a model: real coordinator, real sampler, a judge over HTTP that is down at first."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from node.wire.rollouts import encoded_from_wire, group_from_wire
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import running_hub
from support.identity import MadeRun, make_run
from support.judge_server import JudgeServer, judge_server
from support.sampler import learning, sampling
from support.tiny_model import make_tiny_model
from support.waiting import until


@pytest.fixture
def made(tmp_path: Path) -> MadeRun:
    return make_run(tmp_path, now=time.time())


@pytest.fixture
def server() -> Iterator[JudgeServer]:
    with judge_server() as running:
        yield running


async def test_a_judge_that_is_down_blames_no_prompt_and_grades_once_it_is_back(
    made: MadeRun, server: JudgeServer, tmp_path: Path
) -> None:
    threads = torch.get_num_threads()
    model_dir = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    base = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": f"{n}+1="}) for n in range(6)))
    judge = {"model": "wise", "template": "{question} {completion}", "score_pattern": r"Score: (\d+)"}
    server.answer = lambda request: request.send(503, "down")
    async with (
        running_hub(
            made,
            task="jsonl",
            prompts=None,
            data={"file": data},
            task_options={"grader": "judge", "judge": judge},
            group_size=2,
            max_staleness_versions=500,
        ) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(
            made,
            hub.address,
            model_dir,
            judge={"url": server.url, "models": ["wise"], "attempts": 2, "timeout_s": 5},
        ) as sampler,
    ):
        drain = await learner.drain(credits=100)
        await until(lambda: sampler.value("grader_outages_total", reason="failed") >= 2)
        assert (await learner.status()).bad_prompts_total == 0
        server.answer = lambda request: request.say("Score: 5")
        async with asyncio.timeout(45):
            while (response := await drain.hear()).WhichOneof("message") != "group":
                pass
        group = group_from_wire(encoded_from_wire(response.group))
    torch.set_num_threads(threads)
    assert [completion.reward for completion in group.completions] == [0.5, 0.5]
    assert group.metrics["judge_score"].tolist() == [5.0, 5.0]
