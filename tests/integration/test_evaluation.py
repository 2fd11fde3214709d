"""Held-out prompts on a real coordinator, ledger and sampler; the learner is driven by hand."""

import json
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from heterorl.v1 import common_pb2, rollout_pb2
from node.commands.cli import main
from node.coordinator.ledger.ledger_check import read_evaluations
from node.coordinator.requests import rollout_servicer
from node.coordinator.requests.rollout_messages import held_out_submission_of
from node.coordinator.work.decisions.submitted_groups import Submission
from node.values.evaluation import REWARD, Evaluation, best_of
from node.values.run import RunStatus
from node.wire.mapping import from_wire
from sampler.engines.torch.torch_engine import TorchEngine
from sampler.tasks.task import CompletionText
from support.graded_texts import share_of_digits
from support.groups import make_completion
from support.hub import HandPeer, RunningHub, running_hub
from support.identity import MadeRun
from support.sampler import learner_of, learning, sampling
from support.waiting import eventually, until

GRADER = "support.graded_texts:share_of_digits"
EVALUATION = {"every_versions": 1, "prompts": 6}


def ledger(made: MadeRun) -> Path:
    return made.directory / "coordinator" / "ledger.sqlite"


async def newest(peer: HandPeer) -> Evaluation | None:
    return from_wire(RunStatus, await peer.status()).evaluation.newest


async def lease_all(sampler: HandPeer) -> list[rollout_pb2.PromptLease]:
    """Lease every held-out prompt that one sampler may have now."""
    leases = (await sampler.lease(24)).leases
    return [one for one in leases if one.purpose == rollout_pb2.LEASE_PURPOSE_EVALUATION]


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

        async def has_evaluated(version: int) -> bool:
            evaluation = await newest(learner)
            return evaluation is not None and evaluation.version == version

        await eventually(lambda: has_evaluated(0))
        await learner.publish(*learner_of(made, base).signed(1, None))
        await drain.step(1, await drain.group())
        await eventually(lambda: has_evaluated(1))
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
        assert one.counted_prompts == 6
        assert (one.answers, one.samplers) == (6, 1)
        assert one.reward_mean is not None
        assert 0 <= one.reward_mean <= 1
        assert one.tokens_mean is not None
        assert 1 <= one.tokens_mean <= 8
        assert one.started_at_s <= one.finished_at_s
    page = made.directory / "report.html"
    assert main(["report", "--ledger", str(ledger(made)), "--out", str(page)]) == 0
    report = page.read_text()
    [told_best] = [row for row in report.split("<tr>") if "<td>best</td>" in row]
    assert told_best.startswith(f"<td>{best.version}</td><td>{best.score_text}</td>")
    assert all(one.score_text in report for one in (first, second))


async def begun(hub: RunningHub, learner: HandPeer, sampler: HandPeer) -> None:
    """Join, and wait until the base model is due or under evaluation."""
    await learner.join()
    await sampler.join()
    await learner.drain()

    async def is_due() -> bool:
        return (await learner.heartbeat()).HasField("evaluating_version")

    await eventually(is_due)


async def has_finished(learner: HandPeer) -> bool:
    return await newest(learner) is not None


async def test_leases_say_what_they_are_for_and_their_groups_do_not_reach_the_learner(made: MadeRun) -> None:
    async with (
        running_hub(made, evaluation=EVALUATION, max_staleness_versions=100) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as sampler,
    ):
        await begun(hub, learner, sampler)
        assert not (await sampler.heartbeat()).HasField("evaluating_version")
        answer = await sampler.lease(24)
        held_out = [one for one in answer.leases if one.purpose == rollout_pb2.LEASE_PURPOSE_EVALUATION]
        assert [one.prompt_index for one in held_out] == list(range(94, 100))
        assert {(one.group_size, one.sampling.top_k) for one in held_out} == {(1, 1)}
        assert {one.policy_version for one in held_out} == {0}
        assert answer.evaluate_from == 1
        training = answer.leases[len(held_out) :]
        assert [one.lease_id for one in training] == [f"{n}.1" for n in range(18)]
        assert {(one.group_size, one.sampling.top_k) for one in training} == {(2, 0)}
        for one in held_out:
            submitted = await sampler.submit(one)
            assert submitted.verdict == common_pb2.VERDICT_SPOOLED
        await eventually(lambda: has_finished(learner))
        status = from_wire(RunStatus, await learner.status())
        assert status.evaluation.under_way is None
        assert (status.slots["leased"], status.slots["spooled"], status.verdicts) == (18, 0, {})
        assert (await learner.heartbeat()).best_version == 0


async def test_the_answer_to_a_held_out_prompt_is_read_beside_the_event_loop(
    made: MadeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[threading.Thread] = []

    def noted(*args: Any, **kwargs: Any) -> Submission:
        readers.append(threading.current_thread())
        return held_out_submission_of(*args, **kwargs)

    monkeypatch.setattr(rollout_servicer, "held_out_submission_of", noted)
    async with (
        running_hub(made, evaluation=EVALUATION, max_staleness_versions=100) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as sampler,
    ):
        await begun(hub, learner, sampler)
        first, second = (await lease_all(sampler))[:2]
        beyond_vocabulary = make_completion(1, token_ids=np.array([100], np.int32))
        answers = [
            await sampler.submit(second, completions=(beyond_vocabulary,)),
            await sampler.submit(first),
        ]
    verdicts = [common_pb2.VERDICT_MALFORMED, common_pb2.VERDICT_SPOOLED]
    assert [answer.verdict for answer in answers] == verdicts
    assert len(readers) == 2
    assert threading.current_thread() not in readers


async def test_a_forged_reward_moves_no_score_and_no_best_version(made: MadeRun) -> None:
    """One sampler asks first and says that all it is asked is worth 100."""
    async with (
        running_hub(made, evaluation=EVALUATION, max_staleness_versions=100) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as liar,
        hub.peer(made.other_sampler) as honest,
    ):
        await begun(hub, learner, liar)
        await honest.join()
        for sampler, reward in ((liar, 100.0), (honest, 0.25)):
            leases = await lease_all(sampler)
            assert len(leases) == 6
            for one in leases:
                completions = tuple(make_completion(reward=reward) for _ in range(one.group_size))
                submitted = await sampler.submit(one, completions=completions)
                assert submitted.verdict == common_pb2.VERDICT_SPOOLED
        await eventually(lambda: has_finished(learner))
        evaluation = from_wire(RunStatus, await learner.status()).evaluation
    assert evaluation.newest is not None
    assert (evaluation.newest.reward_mean, evaluation.newest.answers) == (0.25, 12)
    assert evaluation.best == evaluation.newest


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


async def test_rows_that_are_held_out_travel_with_their_leases(made: MadeRun, tmp_path: Path) -> None:
    settings = settings_of_rows(tmp_path, held_out=8, temperature=0.5, completions=3, max_new_tokens=4)
    async with (
        running_hub(made, **settings, max_staleness_versions=100) as hub,
        hub.peer() as learner,
        hub.peer(made.sampler) as sampler,
    ):
        await begun(hub, learner, sampler)
        leases = await lease_all(sampler)
    assert [json.loads(one.row)["answer"] for one in leases] == [13, 14, 15, 16, 17, 18]
    (sampled,) = {one.sampling.SerializeToString() for one in leases}
    sampling_parameters = common_pb2.SamplingParameters.FromString(sampled)
    assert (sampling_parameters.temperature, sampling_parameters.max_new_tokens) == (0.5, 4)
    assert {one.group_size for one in leases} == {3}


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

        async def is_evaluated() -> bool:
            return await newest(learner) is not None

        await eventually(is_evaluated)
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
