"""Stop strings and min-p, configured at a coordinator, from a sampler's engine to the learner."""

import time
from pathlib import Path

import torch

from heterorl.v1 import common_pb2
from node.values.groups.rollout import Finish
from node.values.groups.well_formed import check_group
from node.wire.rollouts import encoded_from_wire, group_from_wire
from sampler.engines.text.stop_strings import text_before_stop
from sampler.engines.torch.torch_engine import TorchEngine
from support.hub import running_hub
from support.identity import make_run
from support.sampler import learning, sampling
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model

STOP = ["a", "7", "=3"]


async def test_the_learner_gets_the_stop_string_and_the_grader_the_text_before_it(tmp_path: Path) -> None:
    made = make_run(tmp_path, now=time.time())
    model_dir = make_tiny_model(tmp_path / "model", hidden=32, layers=1)
    base = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    task = {"length": "support.length_task:Length"}
    seen: set[Finish] = set()
    async with (
        running_hub(made, task="length", group_size=8, stop=STOP, min_p=0.01) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, custom_tasks=task),
    ):
        drain = await learner.drain(credits=40)
        while seen != {Finish.STOP, Finish.LENGTH}:
            group = group_from_wire(encoded_from_wire((await drain.hear()).group))
            check_group(group, vocabulary_size=VOCABULARY_SIZE)
            assert (group.sampling.stop, group.sampling.min_p) == (tuple(STOP), 0.01)
            for completion in group.completions:
                assert completion.kept_mass is not None
                text = base.tokenizer.decode(completion.token_ids)
                before = text_before_stop(text, STOP)
                assert (text != before) == (completion.finish is Finish.STOP)
                assert completion.reward == len(before)
                seen |= {completion.finish} - {Finish.END}
            await drain.judge(group.group_id, common_pb2.VERDICT_STALE)
