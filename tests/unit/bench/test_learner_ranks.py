"""The benchmark of ranks compares the same batches, and its report has every line."""

import json
from pathlib import Path

from bench.learner_life import EVERY_VERSIONS, REPLAYED, live
from bench.learner_ranks import QUICK, batches_of, keep
from bench.learner_report import RANKS_FILE, rank_report
from bench.learner_steps import make_model
from learner.config import LearnerConfig
from node.values.rollout import RolloutGroup
from node.values.well_formed import check_group

LIFE = {
    "kind": "tiny",
    "life": "dp_shard",
    "ranks": 4,
    "step_s": 2.0,
    "stall_share": 0.0123,
    "copy_s": 0.5,
    "write_s": 3.0,
    "checkpoint_bytes": 80 << 20,
    "journal_bytes": 2048,
    "written_bytes": 5 << 20,
    "over_per_step": 16.0,
    "resume_s": 21.5,
    "replayed_steps": 5,
    "replay_s": 11.0,
}
STEP = {
    "kind": "tiny",
    "step": "ours, dp_shard",
    "ranks": 2,
    "seconds": 0.25,
    "peak_bytes": 3 << 20,
    "planned_bytes": 2 << 20,
    "held_share": 0.5,
}
CURVE = {
    "kind": "tiny",
    "curve": "dp_shard",
    "ranks": 2,
    "losses": [0.5, 0.25],
    "apart": 1e-6,
    "apart_over_spread": 4e-6,
}


def test_batches_are_written_by_the_model_and_differ() -> None:
    model = make_model(QUICK).train(False)
    first, second = batches_of(model, QUICK, count=2)
    [again] = batches_of(model, QUICK, count=1)
    for group in (*first, *second):
        check_group(group, vocabulary_size=QUICK.vocabulary)
        assert {len(completion.token_ids) for completion in group.completions} == {QUICK.completion_tokens}
        assert len({completion.reward for completion in group.completions}) > 1

    def tokens(batch: list[RolloutGroup]) -> list[list[int]]:
        return [completion.token_ids.tolist() for group in batch for completion in group.completions]

    assert tokens(first) == tokens(again)
    assert tokens(first) != tokens(second)


def test_the_report_has_a_table_of_steps_of_lives_and_of_curves() -> None:
    assert rank_report([]) == ""
    text = rank_report([STEP, LIFE, CURVE])
    assert "| ours, dp_shard | 2 | 0.250 | 3.0 | 2.0 | 0.5 |" in text
    assert "| 4 | 2.000 | 1.2 | 0.500 | 80.0 | 2.0 | 5.0 | 16.0 | 21.5 | 11.0 (5) |" in text
    assert "| 2 | 0.50000 0.25000 | 1.0e-06 | 4.0e-06 |" in text


def test_lines_of_other_models_and_parts_stay_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "learner.jsonl").write_text("")
    (tmp_path / RANKS_FILE).write_text("".join(json.dumps(line) + "\n" for line in (STEP, LIFE)))
    newer = {**STEP, "seconds": 0.5}
    keep([newer, CURVE], tmp_path)
    lines = [json.loads(line) for line in (tmp_path / RANKS_FILE).read_text().splitlines()]
    assert lines == [LIFE, newer, CURVE]


def test_a_life_of_one_rank_resumes_behind_its_newest_checkpoint(tmp_path: Path) -> None:
    model = make_model(QUICK).train(False)
    model.save_pretrained(tmp_path / "model")
    [batch] = batches_of(model, QUICK, count=1)
    config = LearnerConfig(
        model_dir=tmp_path / "model",
        learning_rate=1e-6,
        threads=1,
        checkpoint_every_versions=EVERY_VERSIONS,
    )
    (tmp_path / "state").mkdir()
    lived = live(config, batch, tmp_path / "state", steps=2 * EVERY_VERSIONS + REPLAYED)
    again = live(config, batch, tmp_path / "state", steps=0)
    assert (lived["replayed_steps"], again["replayed_steps"]) == (0, REPLAYED)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert lived["checkpoint_bytes"] > 12 * parameters
    assert lived["cycle_steps"] >= EVERY_VERSIONS
    assert lived["calm_s"]
    assert 0 < len(lived["beside_s"]) <= lived["cycle_steps"]
    a_step = lived["checkpoint_bytes"] / EVERY_VERSIONS + lived["journal_bytes"]
    assert lived["checkpoint_bytes"] / a_step > 15
