from dataclasses import replace

import numpy as np
import pytest

from learner.intake.group_verdict import GroupRules, judge, stale
from node.values.groups.rollout import RolloutGroup
from node.values.groups.verdict import GroupVerdict, Verdict
from support.groups import SAMPLING, make_completion, make_group

RULES = GroupRules(
    run_id="run",
    layout_digest=b"l" * 16,
    tokenizer_digest=b"t" * 16,
    vocabulary_size=42,
    context_tokens=256,
    group_size=2,
    max_staleness_versions=2,
)


def judged(group: RolloutGroup, *, version: int = 0, trained: frozenset[str] = frozenset()) -> GroupVerdict:
    return judge(group, RULES, version=version, trained_group_ids=trained)


def pair(**changes: object) -> tuple[object, object]:
    return make_completion(**changes), make_completion()  # type: ignore[arg-type]


def truncated(kept_mass: float, *, behaviour_logprob: float = -0.5, **sampling: float) -> dict[str, object]:
    completion = make_completion(
        behaviour_logprob=np.full(3, behaviour_logprob, np.float32),
        kept_mass=np.array([1.0, kept_mass, 1.0], np.float32),
    )
    return {
        "completions": (completion, make_completion(kept_mass=np.ones(3, np.float32))),
        "sampling": replace(SAMPLING, **sampling),  # type: ignore[arg-type]
    }


def test_an_honest_group_is_accepted_without_a_word() -> None:
    assert judged(make_group()) == GroupVerdict(make_group().group_id, Verdict.ACCEPTED)


@pytest.mark.parametrize(
    ("changes", "verdict", "says"),
    [
        ({"run_id": "other"}, Verdict.FOREIGN, "run 'other'"),
        ({"layout_digest": b"x" * 16}, Verdict.FOREIGN, "layout digest 7878"),
        ({"tokenizer_digest": b"x" * 16}, Verdict.FOREIGN, "tokenizer digest 7878"),
        ({"sampling": replace(SAMPLING, top_p=0.9)}, Verdict.FOREIGN, "what mass was kept"),
        ({"sampling": replace(SAMPLING, top_k=20)}, Verdict.FOREIGN, "what mass was kept"),
        ({"sampling": replace(SAMPLING, min_p=0.1)}, Verdict.FOREIGN, "min_p=0.1 top_k=0 top_p=1.0"),
        (truncated(0.3, top_k=21, top_p=0.6), Verdict.ACCEPTED, ""),
        (truncated(0.29, top_k=21, top_p=0.6), Verdict.SUSPECT, "keep 0.3 at least"),
        (truncated(0.3, min_p=1 / 41, top_p=0.6), Verdict.ACCEPTED, ""),
        (truncated(0.29, min_p=1 / 41, top_p=0.6), Verdict.SUSPECT, "keep 0.3 at least"),
        # -29.5 nats among the tokens kept, log 0.5 below that in the whole softmax
        (truncated(0.5, top_k=21, behaviour_logprob=-29.5), Verdict.SUSPECT, "-30.19"),
        (truncated(1.0, top_k=21, behaviour_logprob=-29.5), Verdict.ACCEPTED, ""),
        (truncated(float("nan"), top_k=21), Verdict.MALFORMED, "kept mass"),
        ({"sampling": replace(SAMPLING, temperature=1e-30)}, Verdict.MALFORMED, "temperature"),
        ({"sampling": replace(SAMPLING, temperature=100.5)}, Verdict.MALFORMED, "temperature 100.5"),
        ({"sampling": replace(SAMPLING, temperature=0.01)}, Verdict.ACCEPTED, ""),
        ({"sampling": replace(SAMPLING, temperature=100.0)}, Verdict.ACCEPTED, ""),
        ({"completions": pair()[:1]}, Verdict.MALFORMED, "1 completions, the run's groups have 2"),
        ({"completions": pair(tokens=42)}, Verdict.ACCEPTED, ""),
        ({"completions": pair(tokens=43)}, Verdict.MALFORMED, "token id 42"),
        ({"completions": pair(tokens=3, reward=1e6)}, Verdict.ACCEPTED, ""),
        ({"completions": pair(tokens=3, reward=-1e6)}, Verdict.ACCEPTED, ""),
        ({"completions": pair(tokens=3, reward=1e38)}, Verdict.MALFORMED, "reward"),
        ({"completions": pair(tokens=3, reward=-1e38)}, Verdict.MALFORMED, "reward -1e+38, beyond 1e+06"),
        ({"completions": (make_completion(reward=float("nan")),) * 2}, Verdict.MALFORMED, "reward nan"),
        ({"completions": pair(tokens=3, reward=float("nan"))}, Verdict.ACCEPTED, ""),  # one abstained
        ({"completions": pair(behaviour_logprob=np.full(3, -99.0, np.float32))}, Verdict.SUSPECT, "nats"),
        ({"completions": pair(behaviour_logprob=np.full(3, -30.0, np.float32))}, Verdict.ACCEPTED, ""),
        ({"completions": pair(version=1)}, Verdict.FOREIGN, "version 1 does not exist yet"),
        ({"prompt_token_ids": np.ones(252, np.int32)}, Verdict.ACCEPTED, ""),
        ({"prompt_token_ids": np.ones(253, np.int32)}, Verdict.MALFORMED, "257 tokens, the model takes 256"),
    ],
)
def test_the_first_rule_broken_gives_the_verdict_and_says_why(
    changes: dict[str, object], verdict: Verdict, says: str
) -> None:
    answer = judged(make_group(**changes))  # type: ignore[arg-type]
    assert answer.verdict is verdict
    assert says in answer.detail


@pytest.mark.parametrize(("version", "verdict"), [(7, Verdict.ACCEPTED), (8, Verdict.STALE)])
def test_staleness_is_counted_from_the_oldest_token_of_the_group(version: int, verdict: Verdict) -> None:
    old_start = make_completion(policy_version=np.array([5, 6, 7], np.int32))
    group = make_group(completions=(make_completion(version=7), old_start))
    assert judged(group, version=version).verdict is verdict


@pytest.mark.parametrize("skipped", [5, 7])
def test_a_version_that_was_made_and_never_published_is_foreign(skipped: int) -> None:
    """The coordinator takes the learner's word for what there is; what is public the learner alone knows."""
    old_start = make_completion(policy_version=np.array([5, 6, 7], np.int32))
    group = make_group(completions=(make_completion(version=7), old_start))
    rules = replace(RULES, was_skipped={skipped}.__contains__)
    answer = judge(group, rules, version=7, trained_group_ids=())
    assert (answer.verdict, f"version {skipped}" in answer.detail) == (Verdict.FOREIGN, True)


def test_a_group_that_was_trained_on_is_a_duplicate_even_when_it_is_stale_too() -> None:
    group = make_group("3.1", version=0)
    assert judged(group, version=100, trained=frozenset({"3.1"})).verdict is Verdict.DUPLICATE


def test_staleness_alone_says_nothing_within_the_bound() -> None:
    assert stale(make_group(version=3), version=5, max_staleness_versions=2) is None
