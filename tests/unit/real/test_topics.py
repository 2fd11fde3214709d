"""Rows of the ranking recipe: one candidate is right, and no word gives it away."""

import json
from pathlib import Path

import pytest

from deploy.real.real_plan import NOISE_MASK, RANKING, TASK_FILES, Plan
from deploy.real.topics import ROWS, TOPICS, write_topics
from node.kinds.ranking.task import RankingTask
from sampler.tasks.task import CompletionText


def rows(path: Path) -> list[dict[str, object]]:
    write_topics(path)
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_row_is_one_that_the_task_takes_and_only_its_topic_is_right(tmp_path: Path) -> None:
    topic_of = {word: number for number, topic in enumerate(TOPICS) for word in topic.split()}
    task = RankingTask()
    found = rows(tmp_path / "topics.jsonl")
    assert len(found) == ROWS
    for row in found:
        query, candidates, relevance = str(row["query"]), row["candidates"], row["relevance"]
        assert isinstance(candidates, list)
        assert isinstance(relevance, list)
        topics = [topic_of[text.split()[0]] for text in candidates]
        assert len(set(topics)) == len(candidates)
        assert topics[relevance.index(1)] == topic_of[query.split()[0]]
        assert not set(query.split()) & {word for text in candidates for word in text.split()}
        order = sorted(range(len(candidates)), key=relevance.__getitem__, reverse=True)
        completion = CompletionText(" ".join(map(str, order)), len(order), "end")
        assert task.grade(0, row, completion) == (1.0, {"ndcg": 1.0, "mrr": 1.0, "recall": 1.0})
        assert json.loads(str(task.prompt(0, row))) == {"query": query, "candidates": candidates}


def test_the_rows_are_the_same_every_time(tmp_path: Path) -> None:
    assert rows(tmp_path / "one") == rows(tmp_path / "two")


def test_the_recipe_beside_a_task_is_its_own() -> None:
    common = {"model": Path("model"), "engines": (), "seed": 0, "seconds": 1.0, "gain": 0.4}
    plan = Plan(task_file=TASK_FILES["ranking"], **common)  # type: ignore[arg-type]
    assert plan.recipe == RANKING
    assert tuple(plan.readers) == ("transformers", "ranking-engine")
    assert Plan(task_file=TASK_FILES["noise_mask"], **common).recipe == NOISE_MASK  # type: ignore[arg-type]
    assert Plan(task_file=Path("mine.toml"), **common).recipe != RANKING  # type: ignore[arg-type]


GRADES = [
    ([3, 2, 3, 0, 1, 2], range(6), 6, 0.960808),
    ([0, 1], [0, 1], 10, 0.630929754),
    ([0, 0, 5], [0, 1, 2], 2, 0.0),
]
"""Relevance, order, positions that count, nDCG with linear gains; the first is Wikipedia's example."""


@pytest.mark.parametrize(("relevance", "order", "k", "ndcg"), GRADES)
def test_ndcg_is_that_of_its_definition(
    relevance: list[float], order: range | list[int], k: int, ndcg: float
) -> None:
    task = RankingTask(k=k)
    row = {"query": "q", "candidates": ["c"] * len(relevance), "relevance": relevance}
    graded = task.grade(0, row, CompletionText(" ".join(map(str, order)), len(relevance), "end"))
    assert isinstance(graded, tuple)
    assert graded[0] == pytest.approx(ndcg, abs=1e-6)


@pytest.mark.parametrize("relevance", [[0, 0], [1], [1, -1], [1, float("nan")], "12", None])
def test_a_row_without_a_number_for_each_candidate_is_refused_when_it_is_asked(relevance: object) -> None:
    row = {"query": "q", "candidates": ["a", "b"], "relevance": relevance}
    with pytest.raises((ValueError, TypeError), match="relevance"):
        RankingTask().prompt(0, row)
