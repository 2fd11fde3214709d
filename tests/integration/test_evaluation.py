"""Held-out prompts on a real coordinator, ledger and sampler; the learner is driven by hand."""

import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from heterorl.v1 import common_pb2, rollout_pb2
from node.coordinator.ledger.ledger_check import read_evaluations
from node.coordinator.requests.rollout_messages import held_out_submission_of
from node.errors import Reason, RefusedError
from node.values.evaluation import REWARD, best_of
from node.values.run import RunStatus
from node.wire.mapping import from_wire
from node.wire.rollouts import group_to_wire
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.tasks.task import CompletionText
from support.graded_texts import share_of_digits
from support.groups import make_completion, make_group
from support.hub import HandPeer, running_hub
from support.identity import MadeRun
from support.sampler import learner_of, learning, sampling
from support.waiting import eventually, until

GRADER = "support.graded_texts:share_of_digits"
EVALUATION = {"every_versions": 1, "prompts": 6}


def ledger(made: MadeRun) -> Path:
    return made.directory / "coordinator" / "ledger.sqlite"


async def has_evaluated(peer: HandPeer, version: int) -> bool:
    evaluation = from_wire(RunStatus, await peer.status()).evaluation.newest
    return evaluation is not None and evaluation.version == version


async def test_a_sampler_answers_held_out_prompts_of_each_version_and_the_learner_hears_the_best(
    made: MadeRun,
    base: TorchEngine,
    model_dir: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "sampler.rollouts.group_pipeline")
    async with (
        running_hub(made, evaluation=EVALUATION, max_staleness_versions=9) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir) as sampler,
    ):
        drain = await learner.drain(credits=100)
        await eventually(lambda: has_evaluated(learner, 0))
        await learner.publish(*learner_of(made, base).signed(1, None))
        await drain.step(1, await drain.group())
        await eventually(lambda: has_evaluated(learner, 1))
        status = from_wire(RunStatus, await learner.status())
        answer = await learner.heartbeat()
        assert answer.HasField("best_version")
        assert not answer.HasField("evaluating_version")
        assert sampler.value("dropped_groups_total", reason="refused") == 0
        await until(lambda: hub.metric("heterorl_coordinator_evaluation_version") == 1)
        assert hub.metric("heterorl_coordinator_evaluation_groups_total", verdict="spooled") == 12
    told = [vars(record) for record in caplog.records if record.message == "groups submitted"]
    assert {one["purpose"] for one in told} == {"training", "evaluation"}
    assert sum(one["groups"] for one in told if one["purpose"] == "evaluation") == 12
    first, second = read_evaluations(ledger(made))
    assert (status.evaluation.first, status.evaluation.newest) == (first, second)
    best = best_of((first, second), REWARD)
    assert best is not None
    assert (answer.best_version, status.evaluation.best) == (best.version, best)
    for one, version in ((first, 0), (second, 1)):
        assert (one.version, one.first_prompt, one.prompts, one.completions) == (version, 94, 6, 1)
        assert (one.counted_prompts, one.answers, one.samplers) == (6, 6, 1)


ROWS = [{"prompt": f"{n}+1=", "sum": n + 1, "answer": n + 1} for n in range(20)]


def settings_of_rows(directory: Path, *, held_out: int, **evaluation: Any) -> dict[str, Any]:
    """Write the rows to a file and return the settings of a run on them."""
    data = directory / "sums.jsonl"
    data.write_text("\n".join(map(json.dumps, ROWS)))
    return {
        "task": "jsonl",
        "prompts": None,
        "data": {"file": data, "evaluation_rows": held_out},
        "evaluation": EVALUATION | evaluation,
    }


async def test_leases_say_what_they_are_for_and_groups_of_held_out_rows_do_not_reach_the_learner(
    made: MadeRun, tmp_path: Path
) -> None:
    settings = settings_of_rows(tmp_path, held_out=8, temperature=0.5, completions=3, max_new_tokens=6)
    async with (
        running_hub(made, **settings, max_staleness_versions=100) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as sampler,
    ):
        await learner.join()
        await sampler.join()
        await learner.drain()

        async def is_due() -> bool:
            return (await learner.heartbeat()).HasField("evaluating_version")

        await eventually(is_due)
        assert not (await sampler.heartbeat()).HasField("evaluating_version")
        answer = await sampler.lease(24)
        held_out = [one for one in answer.leases if one.purpose == rollout_pb2.LEASE_PURPOSE_EVALUATION]
        assert [json.loads(one.row)["answer"] for one in held_out] == [13, 14, 15, 16, 17, 18]
        for one in held_out:
            assert (one.group_size, one.policy_version) == (3, 0)
            assert (one.sampling.temperature, one.sampling.max_new_tokens) == (0.5, 6)
        assert answer.evaluate_from == 1
        training = answer.leases[len(held_out) :]
        assert [one.lease_id for one in training] == [f"{n}.1" for n in range(18)]
        assert {(one.group_size, one.sampling.temperature) for one in training} == {(2, 1.0)}
        for one in held_out:
            assert (await sampler.submit(one)).verdict == common_pb2.VERDICT_SPOOLED
        await eventually(lambda: has_evaluated(learner, 0))
        status = from_wire(RunStatus, await learner.status())
        assert status.evaluation.under_way is None
        assert (status.slots["leased"], status.slots["spooled"]) == (18, 0)
        assert (await learner.heartbeat()).best_version == 0


def test_an_answer_to_a_held_out_prompt_that_nobody_can_have_drawn_is_malformed() -> None:
    beyond_vocabulary = make_completion(1, token_ids=np.array([100], np.int32))
    group = group_to_wire(make_group("e0-0.1", completions=(beyond_vocabulary,)))
    said = held_out_submission_of(group, vocabulary_size=100).header
    assert isinstance(said, RefusedError)
    assert said.reason is Reason.MALFORMED


async def test_the_score_of_held_out_rows_is_that_of_greedy_text_by_transformers(
    made: MadeRun, base: TorchEngine, model_dir: Path, tmp_path: Path
) -> None:
    settings = settings_of_rows(tmp_path, held_out=6, max_new_tokens=20)
    async with (
        running_hub(made, **settings, task_options={"grader": GRADER}, max_staleness_versions=9) as hub,
        learning(hub, base, model_dir) as learner,
        sampling(made, hub.address, model_dir, allowed_graders=[GRADER]),
    ):
        await learner.drain()
        await eventually(lambda: has_evaluated(learner, 0))
    model: Any = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    rewards, tokens = [], []
    for row in ROWS[14:]:
        prompt = torch.tensor(base.tokenizer.encode(str(row["prompt"])))[None]
        (whole,) = model.generate(prompt, max_new_tokens=20, do_sample=False, pad_token_id=0)
        written = whole[prompt.shape[1] :].numpy()
        text = CompletionText(base.tokenizer.decode(written), len(written), "end")
        rewards.append(share_of_digits(row, text)[0])
        tokens.append(len(written))
    (evaluation,) = read_evaluations(ledger(made))
    assert len(set(rewards)) > 1
    assert evaluation.reward_mean == pytest.approx(sum(rewards) / 6, abs=1e-6)
    assert evaluation.tokens_mean == sum(tokens) / 6
    assert (evaluation.first_prompt, evaluation.max_new_tokens) == (14, 20)
