"""Every installed engine in a whole sampler: versions followed in flight, as the learner signed them."""

from pathlib import Path

import numpy as np
import pytest
import torch

from node.exit_code import ExitCode
from node.values.groups.well_formed import check_group
from sampler.engines.torch.torch_engine import TorchEngine
from support.engines import WAYS, Driven, marks_of, settings_of, tolerance_of
from support.hub import running_hub
from support.identity import MadeRun
from support.sampler import learner_of, learning, sampling
from support.tiny_model import VOCABULARY_SIZE, make_tiny_model
from support.waiting import until


@pytest.mark.parametrize(
    ("name", "apply"),
    [pytest.param(name, apply, marks=marks_of(name)) for name, apply in WAYS],
    ids=["-".join(way) for way in WAYS],
)
async def test_groups_that_span_a_version_are_scored_under_the_version_each_token_names(
    made: MadeRun, tmp_path: Path, name: str, apply: str
) -> None:
    model_dir = make_tiny_model(tmp_path / "model", head_size=32)
    base = TorchEngine(model_dir, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    learner = learner_of(made, base)
    twin = Driven.of(base, "spare", model_dir, tolerance=tolerance_of(name))
    async with (
        running_hub(made, max_new_tokens=100, max_staleness_versions=50) as hub,
        learning(hub, base, model_dir) as peer,
        sampling(made, hub.address, model_dir, apply=apply, **settings_of(name, model_dir)) as sampler,
    ):
        await until(lambda: sampler.value("decode_steps_total") > 5)
        await peer.publish(*learner.signed(1, None))
        twin.versions[1] = learner.versions[1].words
        await until(lambda: sampler.value("held_version") == 1)
        spooled = int(sampler.value("groups_total", verdict="spooled"))
        await until(lambda: sampler.value("groups_total", verdict="spooled") >= spooled + 6)
        groups = await peer.groups(spooled + 6)
        assert await sampler.drained() is ExitCode.DRAINED
        assert sampler.value("engine_restarts_total") == sampler.value("probe_failures_total") == 0
    versions = set()
    for group in groups:
        check_group(group, vocabulary_size=VOCABULARY_SIZE)
        prompt = base.tokenizer.decode(group.prompt_token_ids)
        for completion in group.completions:
            twin.assert_scored(prompt, [completion], group.sampling)
            versions.add(tuple(np.unique(completion.policy_version).tolist()))
    assert (1,) in versions
