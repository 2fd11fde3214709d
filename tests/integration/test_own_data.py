"""A data set of one's own: rows from the coordinator's file, graded by samplers that have no file."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from node.grading.jsonl_options import JsonlOptions
from sampler.engines.torch.torch_engine import TorchEngine
from support.identity import MadeRun
from support.learning import trained
from support.sampler import sampled, verifying
from support.tiny_model import make_tiny_model
from support.waiting import until

ROWS = 20
TEMPLATE = "{% for m in messages %}{{ m.role[0] }} {{ m.content }} {% endfor %}-"
GRADER = "support.graded_texts:share_of_digits"


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    """Return settings of a coordinator with a file of sums; prompt 7 is long."""
    data = tmp_path / "sums.jsonl"
    rows = [{"question": "9" * 60 if n == 7 else f"{n}+1=", "sum": n + 1} for n in range(ROWS)]
    data.write_text("\n".join(map(json.dumps, rows)))
    return {
        "task": "jsonl",
        "prompts": None,
        "data": {"file": data, "evaluation_rows": 4},
        "task_options": {"prompt": "question", "answer": "sum", "grader": "contains"},
        "max_staleness_versions": 500,
    }


async def test_samplers_without_a_file_answer_the_rows_and_say_which_prompts_are_too_long(
    made: MadeRun, base: TorchEngine, model_dir: Path, settings: dict[str, Any]
) -> None:
    settings["task_options"] |= {"max_prompt_tokens": 40, "system": "add"}
    async with sampled(made, base, model_dir, **settings) as (_, learner, _):
        groups = await trained(await learner.drain(credits=1000), groups=2 * ROWS)
        status = await learner.status()
    texts = {group.prompt_index: base.tokenizer.decode(group.prompt_token_ids) for group in groups}
    assert texts.keys() == set(range(16)) - {7}
    assert {text.replace("\n", "") for text in texts.values()} == {f"add{n}+1=" for n in texts}
    contains = JsonlOptions(grader="contains", answer="sum").made_grader
    for group in groups:
        for completion in group.completions:
            right = str(group.prompt_index + 1)
            text = base.tokenizer.decode(completion.token_ids)
            assert [completion.reward] == contains.grade({"sum": right}, [text])
    assert [(bad.prompt_index, bad.reason) for bad in status.bad_prompts] == [(7, "prompt_too_long")]
    assert "max_prompt_tokens = 40" in status.bad_prompts[0].detail
    assert dict(status.bad_prompt_reasons) == {"prompt_too_long": 1}
    assert status.prompts == 16


async def test_chat_prompts_and_the_metrics_of_an_allowed_grader_arrive_with_the_group(
    made: MadeRun, tmp_path: Path, settings: dict[str, Any]
) -> None:
    chatty = make_tiny_model(tmp_path / "chatty", hidden=32, layers=1)
    (chatty / "chat_template.jinja").write_text(TEMPLATE)
    base = TorchEngine(chatty, device="cpu", compute_dtype=torch.float32, threads=1, seed=0)
    settings["task_options"] |= {"grader": GRADER, "system": "add"}
    allowed = {"allowed_graders": [GRADER]}
    async with sampled(made, base, chatty, sampler=allowed, **settings) as (_, learner, _):
        groups = await trained(await learner.drain(credits=1000), groups=6)
    for group in groups:
        question = "9" * 60 if group.prompt_index == 7 else f"{group.prompt_index}+1="
        assert base.tokenizer.decode(group.prompt_token_ids) == f"s add u {question} -"
        tokens = [len(completion.token_ids) for completion in group.completions]
        assert group.metrics["tokens"].tolist() == tokens
        assert group.metrics["row"].tolist() == [group.prompt_index + 1] * len(tokens)


async def test_a_grader_that_asks_for_it_sees_token_ids_and_the_rendered_prompt_at_sampler_and_verifier(
    made: MadeRun, base: TorchEngine, model_dir: Path, settings: dict[str, Any]
) -> None:
    grader = "support.graded_texts:seen_tokens"
    settings["task_options"] |= {"grader": grader}
    allowed = {"allowed_graders": [grader]}
    async with (
        sampled(made, base, model_dir, sampler=allowed, **settings) as (hub, learner, _),
        verifying(made, hub.address, model_dir, **allowed) as verifier,
    ):
        groups = await trained(await learner.drain(credits=1000), groups=6)
        await until(lambda: verifier.value("checks_total", outcome="agreed") >= 2)
        assert verifier.value("checks_total", outcome="disagreed") == 0
    for group in groups:
        for number, completion in enumerate(group.completions):
            assert completion.reward == completion.token_ids[-1]
            assert group.metrics["seen"][number] == len(completion.token_ids)
            assert group.metrics["prompt"][number] == len(group.prompt_token_ids)
