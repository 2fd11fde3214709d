"""Which version is the best, and what a score is without enough answers."""

from dataclasses import replace

import pytest

from node.values.evaluation import REWARD, Evaluation, EvaluationStatus, best_of, evaluation_status

ONE = Evaluation(0, 46, 10, 1, 0.0, 16, 1.0, 2.0, counted_prompts=10, reward_mean=0.5)


def scored(version: int, reward: float | None, *, prompts: int = 10, **metrics: float) -> Evaluation:
    texts = ", ".join(f'"{name}": {value}' for name, value in metrics.items())
    named = f"{{{texts}}}" if metrics else ""
    return replace(ONE, version=version, prompts=prompts, reward_mean=reward, metrics=named)


@pytest.mark.parametrize(
    ("evaluations", "by", "best"),
    [
        ([], REWARD, None),
        ([scored(0, None)], REWARD, None),
        ([scored(0, 0.2), scored(10, 0.7), scored(20, 0.6)], REWARD, 10),
        ([scored(20, 0.6), scored(10, 0.7), scored(0, 0.2)], REWARD, 10),  # whatever their order
        ([scored(10, 0.7), scored(20, 0.7)], REWARD, 10),  # of equals the oldest
        ([scored(0, -3.0), scored(10, -1.0), scored(20, -2.0)], REWARD, 10),
        ([scored(10, 0.7), scored(20, None)], REWARD, 10),
        ([scored(0, 0.9), scored(10, 0.7, prompts=5)], REWARD, 10),  # other prompts: not compared
        ([scored(0, 0.9), scored(10, None, prompts=5)], REWARD, 0),  # and none told of them yet
        ([scored(0, 0.9, exact=0.1), scored(10, 0.1, exact=0.3), scored(20, 1.0)], "exact", 10),
        ([scored(0, 0.9), scored(10, 0.1)], "exact", None),
    ],
)
def test_the_best_is_the_highest_score_of_those_with_the_terms_of_the_newest_score(
    evaluations: list[Evaluation], by: str, best: int | None
) -> None:
    found = best_of(evaluations, by)
    assert (None if found is None else found.version) == best


def test_what_is_worth_a_look() -> None:
    old, first, best, newest = scored(0, 0.9, prompts=5), scored(10, 0.2), scored(20, 0.7), scored(30, None)
    under_way = replace(scored(40, None), finished_at_s=0.0)
    status = evaluation_status([newest, best, old, first], under_way, by=REWARD)
    assert status == EvaluationStatus(newest, first, best, under_way)


@pytest.mark.parametrize(
    ("counted", "prompts", "is_covered"),
    [(0, 1, False), (1, 1, True), (8, 9, False), (57, 64, False), (58, 64, True)],
)
def test_nine_in_ten_prompts_make_a_score(counted: int, prompts: int, is_covered: bool) -> None:
    assert replace(ONE, prompts=prompts, counted_prompts=counted).is_covered is is_covered


def test_a_score_is_told_with_its_error_where_it_has_one() -> None:
    assert scored(0, None).score_text == "no score"
    assert ONE.score_text == "0.500"
    assert replace(ONE, reward_standard_error=0.0625).score_text == "0.500 +- 0.062"
    assert scored(0, 0.5, exact=0.25).score_by("exact") == "exact 0.250, reward 0.500"
    assert scored(0, 0.5).score_by("exact") == "0.500"
