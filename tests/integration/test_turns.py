"""A game of several turns: real coordinator, sampler, engine, graders; a learner by hand and a real one."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from node.exit_code import ExitCode
from node.values.groups.rollout import Completion, Finish
from node.values.groups.well_formed import check_group
from sampler.engines.torch.torch_engine import TorchEngine
from support.guessing_task import Guessing, guessed
from support.hub import running_hub
from support.identity import MadeRun
from support.learning import learn, steps_of, trained
from support.sampler import sampled, sampling
from support.tiny_model import VOCABULARY_SIZE
from support.waiting import until

STOP = list("abcdefghijklmnop")
"""So that a random model says something short."""

SETTINGS = {"task": "game", "prompts": 10, "group_size": 4, "max_new_tokens": 40, "stop": STOP}


def game(name: str = "Guessing") -> dict[str, str]:
    return {"game": f"support.guessing_task:{name}"}


def parts_of(completion: Completion, base: TorchEngine) -> list[str]:
    """Return the texts of turns and replies by turns."""
    edges = np.flatnonzero(np.diff(completion.drawn.astype(int))) + 1
    return [base.tokenizer.decode(part) for part in np.split(completion.token_ids, edges)]


def said_in(turn: str) -> str:
    """Return a turn as the task sees it: up to the stop string."""
    return turn[: min([turn.index(stop) for stop in STOP if stop in turn], default=len(turn))]


async def test_the_learner_gets_whole_games_and_the_logprobs_of_what_was_drawn_in_them(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    async with sampled(
        made, base, model_dir, sampler={"custom_tasks": game()}, **SETTINGS, max_staleness_versions=500
    ) as (_, learner, sampler):
        groups = await trained(await learner.drain(credits=1000), groups=12)
        turns = sampler.value("completion_turns_sum") / sampler.value("completion_turns_count")
        assert sampler.value("reply_seconds_count") > 0
    assert turns > 1.5
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    task = Guessing()
    for group in groups:
        check_group(group, vocabulary_size=VOCABULARY_SIZE)
        for number, completion in enumerate(group.completions):
            parts = parts_of(completion, base)
            turns_said = [said_in(turn) for turn in parts[::2]]
            for said, reply in zip(turns_said, parts[1::2], strict=False):
                assert reply == task.reply(group.prompt_index, None, [{"role": "assistant", "content": said}])
            is_found = guessed(turns_said[-1]) == group.prompt_index
            assert completion.reward == float(is_found)
            assert group.metrics["turns"][number] == len(turns_said) <= 4
            assert group.metrics["drawn"][number] == completion.drawn_tokens
            assert len(completion.token_ids) <= 40
            assert is_found or len(turns_said) == 4 or completion.finish is Finish.LENGTH
            logprob = scored(model, group.prompt_token_ids, completion.token_ids)
            drawn = completion.drawn
            np.testing.assert_allclose(completion.behaviour_logprob[drawn], logprob[drawn], atol=1e-4)


def scored(model: Any, prompt: np.ndarray, token_ids: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, token_ids])).long()
    with torch.no_grad():
        logits = model(ids[None], use_cache=False).logits[0, -len(token_ids) - 1 : -1]
    return np.asarray(torch.log_softmax(logits, -1).gather(-1, ids[-len(token_ids) :, None])[:, 0].numpy())


async def test_a_reply_that_fails_costs_its_prompt_an_attempt_and_the_run_goes_on(
    made: MadeRun, base: TorchEngine, model_dir: Path
) -> None:
    """How else a reply fails, the tests of the pool of graders say."""
    async with sampled(
        made,
        base,
        model_dir,
        sampler={"custom_tasks": game("RepliesNothing")},
        **SETTINGS,
        max_staleness_versions=500,
    ) as (_, learner, sampler):
        groups = await trained(await learner.drain(credits=1000), groups=16)
        failed = sampler.value("prompt_faults_total", reason="grading_failed")
        assert failed == sampler.value("dropped_groups_total", reason="ungraded") >= 1
    assert {group.prompt_index for group in groups} >= {0, 1, 2, 4, 5, 6, 8, 9}


async def test_a_real_learner_trains_on_games(made: MadeRun, base: TorchEngine, model_dir: Path) -> None:
    async with (
        running_hub(made, **SETTINGS, max_staleness_versions=500) as hub,
        sampling(made, hub.address, model_dir, custom_tasks=game()) as sampler,
    ):
        # transformers cannot load two models at once in one process.
        await until(lambda: sampler.registry.get_sample_value("heterorl_sampler_held_version") is not None)
        assert await learn(made, hub.address, model_dir, versions=3) is ExitCode.DRAINED
        await until(lambda: hub.metric("heterorl_coordinator_groups_total", verdict="trained") >= 6)
        assert hub.metric("heterorl_coordinator_groups_total", verdict="malformed") == 0
    steps = steps_of(made)
    assert [step["version"] for step in steps] == [1, 2, 3]
    for step in steps:
        assert step["tokens"] == 8 * step["grader_metrics"]["drawn"]
        # Logprobs of replies, if they counted, would be nats away from the learner's.
        assert step["staleness_max_versions"] > 0 or step["kl_nats"] < 1e-3
