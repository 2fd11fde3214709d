import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from deploy.real.outcome import ExportedModel, Outcome, render, to_document
from deploy.real.real_plan import Plan
from deploy.runs.contributions import Contributions
from node.values.evaluation import Evaluation
from support.demo_records import ledger_of, make_steps

PLAN = Plan(
    model=Path("model"),
    task_file=Path("task.toml"),
    engines=("torch", "vllm"),
    seed=0,
    seconds=60.0,
    gain=0.4,
)
READERS = ("transformers", "torch-engine", "vllm")
EXPORT = ExportedModel(30, "ab", {name: ["7", "12"] for name in READERS})

IDLE = Contributions(first_step_at_s=0.0, steps=4, payload_bytes=10, rounds=())


def _evaluation(version: int, reward: float) -> Evaluation:
    return Evaluation(version, 10, 2, 1, 0.0, 16, 1.0, 2.0, counted_prompts=2, reward_mean=reward)


def _outcome() -> Outcome:
    steps = make_steps()
    return Outcome(
        plan=PLAN,
        run_id="real-1",
        elapsed_s=61.0,
        steps=steps,
        ledger=replace(ledger_of(steps), roots={30: "ab"}),
        exit_codes={"learner": 0},
        evaluations=[_evaluation(0, 0.2), _evaluation(10, 0.7), _evaluation(20, 0.5)],
        export=EXPORT,
    )


def _broken(outcome: Outcome) -> list[str]:
    return [check.promise for check in outcome.checks if not check.is_kept]


def test_a_run_whose_reward_rose_and_whose_export_agrees_keeps_every_promise() -> None:
    assert _broken(_outcome()) == []
    assert _outcome().is_success


@pytest.mark.parametrize(
    ("outcome", "promise"),
    [
        (replace(_outcome(), plan=replace(PLAN, gain=0.51)), "the reward rises by 0.51"),
        (
            replace(_outcome(), evaluations=[_evaluation(0, 0.2), _evaluation(9, 0.5)]),
            "on held-out",
        ),
        (
            replace(_outcome(), evaluations=[_evaluation(10, 0.1), _evaluation(20, 0.7)]),
            "on held-out",
        ),
        (replace(_outcome(), evaluations=[]), "on held-out"),
        (replace(_outcome(), contributions={"contributor-1": IDLE}), "every contributor's steps"),
        (replace(_outcome(), plan=replace(PLAN, engines=("torch",) * 3)), "every sampler's groups"),
        (
            replace(_outcome(), ledger=replace(_outcome().ledger, roots={30: "cd"})),
            "the version that the learner signed",
        ),
        (
            replace(_outcome(), ledger=replace(_outcome().ledger, roots={})),
            "the version that the learner signed",
        ),
        (
            replace(
                _outcome(),
                export=replace(EXPORT, greedy_texts={**EXPORT.greedy_texts, "vllm": ["7", "13"]}),
            ),
            "greedy text",
        ),
        (replace(_outcome(), export=replace(EXPORT, greedy_texts={"transformers": ["7"]})), "greedy text"),
        (
            replace(_outcome(), export=replace(EXPORT, greedy_texts={name: [] for name in READERS})),
            "greedy text",
        ),
        (replace(_outcome(), export=None), "greedy text"),
    ],
)
def test_a_broken_promise_is_named(outcome: Outcome, promise: str) -> None:
    assert any(promise in broken for broken in _broken(outcome))
    assert not outcome.is_success


def test_the_table_and_the_document_have_every_promise() -> None:
    file = io.StringIO()
    Console(file=file, width=240).print(render(_outcome()))
    document = json.loads(json.dumps(to_document(_outcome()), allow_nan=False))
    assert document["samplers"] == {"sampler-1": "torch", "sampler-2": "vllm"}
    for check in _outcome().checks:
        assert check.promise in file.getvalue()
    assert len(document["checks"]) == len(_outcome().checks)
