"""A policy that ranks: sampler and learner give the same rankings the same probabilities, and train."""

import json
import random
from collections import Counter
from dataclasses import replace
from itertools import chain, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import chisquare  # type: ignore[import-untyped]

from learner.model.micro_batches import collate
from learner.model.model import Policy, load_policy
from node.errors import Reason
from node.exit_code import ExitCode
from node.kinds.ranking.engine import RankingEngine
from node.kinds.ranking.values import as_text
from node.values.groups.rollout import Completion, RolloutGroup
from node.values.groups.sampling_parameters import SamplingParameters
from node.values.groups.verdict import Verdict
from sampler.config import SamplerConfig
from sampler.engines.engine import MOST_ASKED, GenerationRequest
from sampler.engines.engine_registry import load_engine
from sampler.engines.words.model_words import ArrayWords, copy_words
from sampler.sampler_role import load_configured_engine
from support.groups import make_group
from support.hub import running_hub
from support.identity import MadeRun
from support.learning import has_learnt, learn
from support.ranking import make_ranker
from support.refusals import cannot_start, refused
from support.sampler import sampling, verifying
from support.scripted_hub import scripted_hub
from support.training_loop import RunningLearner, learner
from support.waiting import until

SEPARATOR = 1
TEMPERED = SamplingParameters(temperature=0.7, top_p=1.0, top_k=0, max_new_tokens=16)
QUERY = as_text("1+2", ["3", "4", "12+5="])


@pytest.fixture(scope="module", params=["Qwen3", "Bert"])
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_ranker(tmp_path_factory.mktemp("ranker"), family=request.param)


def engine_of(model_dir: Path) -> RankingEngine:
    engine = load_engine("auto", SamplerConfig(model_dir=model_dir, seed=3, threads=1))
    assert isinstance(engine, RankingEngine)
    return engine


def drawn(
    engine: RankingEngine, text: str, wanted: int, sampling: SamplingParameters = TEMPERED
) -> tuple[Completion, ...]:
    engine.add(GenerationRequest("1.1", engine.tokenizer.encode(text), wanted, sampling))
    assert (engine.running, engine.waiting) == (1, 1)
    [finished] = engine.step()
    assert 0.0 < engine.use.asked_share <= MOST_ASKED
    assert (engine.running, finished.request_id) == (0, "1.1")
    return finished.completions


def group_of(engine: RankingEngine, text: str, sampling: SamplingParameters = TEMPERED) -> RolloutGroup:
    completions = tuple(replace(one, reward=0.5) for one in drawn(engine, text, 6, sampling))
    return make_group(
        prompt_token_ids=engine.tokenizer.encode(text), completions=completions, sampling=sampling
    )


def logprobs_of(policy: Policy, groups: list[RolloutGroup]) -> torch.Tensor:
    """Return the learner's logprobs of all positions, row after row."""
    rows = range(sum(len(group.completions) for group in groups))
    part = collate(groups, list(rows), width=8, dtype=torch.float32, device=torch.device("cpu"))
    logprobs: torch.Tensor = policy.scorer(part.input_ids, part.positions, part.target_ids, part.temperature)
    return logprobs


def test_learner_and_sampler_agree_on_the_logprob_of_every_position(model_dir: Path) -> None:
    engine, policy = engine_of(model_dir), load_policy(model_dir, device="cpu")
    assert engine.layout == policy.layout
    top = replace(TEMPERED, max_new_tokens=2)
    groups = [group_of(engine, QUERY), group_of(engine, as_text("7", ["1", "22", "333", "4", "5"]), top)]
    assert {len(one.token_ids) for one in groups[1].completions} == {2}
    said = np.concatenate([one.behaviour_logprob for group in groups for one in group.completions])
    np.testing.assert_allclose(logprobs_of(policy, groups).detach().numpy(), said, atol=2e-5)
    assert all(policy.scorer.objection(group) is None for group in groups)


def test_rankings_are_drawn_as_often_as_they_are_likely(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    completions = drawn(engine, QUERY, 6000)
    likely = {tuple(one.token_ids): float(np.exp(one.behaviour_logprob.sum())) for one in completions}
    orders = list(permutations(range(3)))
    assert sum(likely[order] for order in orders) == pytest.approx(1.0, abs=1e-5)
    counted = Counter(tuple(one.token_ids) for one in completions)
    expected = [6000 * likely[order] for order in orders]
    assert chisquare([counted[order] for order in orders], expected, sum_check=False).pvalue > 1e-3


def test_requests_of_one_step_get_what_each_gets_alone(model_dir: Path) -> None:
    together, alone = engine_of(model_dir), engine_of(model_dir)
    texts = [QUERY, as_text("7", ["1", "22"]), as_text("1", ["234"] * 70), as_text("9", ["8", "2"])]
    for number, text in enumerate(texts):
        together.add(GenerationRequest(f"{number}.1", together.tokenizer.encode(text), 5, TEMPERED))
    steps = [together.step() for _ in range(3)]
    assert [[one.request_id for one in of_step] for of_step in steps] == [["0.1", "1.1"], ["2.1"], ["3.1"]]
    for text, found in zip(texts, chain(*steps), strict=True):
        for one, other in zip(found.completions, drawn(alone, text, 5), strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            np.testing.assert_allclose(one.behaviour_logprob, other.behaviour_logprob, atol=1e-5)


def test_greed_takes_the_likeliest_ranking_and_says_what_mass_it_kept(model_dir: Path) -> None:
    engine = engine_of(model_dir)
    [greedy] = drawn(engine, QUERY, 1, replace(TEMPERED, top_k=1))
    likeliest = max(drawn(engine, QUERY, 200), key=lambda one: float(one.behaviour_logprob.sum()))
    assert greedy.token_ids.tolist() == likeliest.token_ids.tolist()
    assert not greedy.behaviour_logprob.any()
    assert greedy.kept_mass is not None
    np.testing.assert_allclose(np.log(greedy.kept_mass), likeliest.behaviour_logprob, atol=1e-5)
    assert engine.tokenizer.decode(greedy.token_ids) == " ".join(map(str, greedy.token_ids))


def test_what_cuts_tokens_off_is_refused_for_rankings(model_dir: Path, subtests: pytest.Subtests) -> None:
    engine = engine_of(model_dir)
    for settings in ({"top_p": 0.9}, {"min_p": 0.1}, {"top_k": 2}, {"stop": ("1",)}):
        sampling = replace(TEMPERED, **settings)
        with subtests.test(str(settings)), refused(Reason.MALFORMED, "coordinator"):
            engine.add(GenerationRequest("1.1", engine.tokenizer.encode(QUERY), 1, sampling))


def test_a_pair_beyond_the_models_context_is_refused_and_many_short_ones_are_not(model_dir: Path) -> None:
    engine, policy = engine_of(model_dir), load_policy(model_dir, device="cpu")
    many = as_text("1", ["234"] * 40)
    assert policy.scorer.objection(group_of(engine, many, replace(TEMPERED, max_new_tokens=40))) is None
    long = engine.tokenizer.encode(as_text("1", ["2" * 60, "3"]))
    with refused(Reason.OVER_LIMIT, "62", "48"):
        engine.add(GenerationRequest("1.1", long, 1, TEMPERED))
    claimed = replace(group_of(engine, as_text("1", ["2", "3"])), prompt_token_ids=long)
    assert policy.scorer.objection(claimed) == "query and candidate have 62 tokens, the model takes 48"


def test_a_request_that_is_not_a_query_with_candidates_is_refused_however_short(
    model_dir: Path, subtests: pytest.Subtests
) -> None:
    engine = engine_of(model_dir)
    for ids in ([5], [5, 6], [5, SEPARATOR], [5, SEPARATOR, 6], [SEPARATOR, 5, SEPARATOR]):
        request = GenerationRequest("1.1", np.array(ids, np.int32), 1, TEMPERED)
        with subtests.test(str(ids)), refused(Reason.MALFORMED, "is not a query and candidates"):
            engine.add(request)
    assert engine.running == 0


def test_the_engines_probe_is_a_ranking_whose_logprob_says_whether_the_scores_are_numbers(
    model_dir: Path,
) -> None:
    engine = engine_of(model_dir)
    one_position = replace(TEMPERED, max_new_tokens=1)
    for words, is_finite in ((None, True), (0x7FC0, False)):
        if words is not None:
            broken = ArrayWords(np.full(engine.layout.words, words, np.uint16))
            copy_words(broken, engine.weights.live, layout=engine.layout)
            engine.weights.settle()
        engine.add(GenerationRequest("probe", engine.probe, 1, one_position))
        [probe] = engine.step()
        assert bool(np.isfinite(probe.completions[0].behaviour_logprob).all()) is is_finite


@pytest.mark.usefixtures("warm_engines")
def test_a_ranking_engine_in_a_process_of_its_own_has_the_same_probe_and_reads_the_same_prompts(
    tmp_path: Path,
) -> None:
    model_dir = make_ranker(tmp_path)
    inside = engine_of(model_dir)
    own = load_configured_engine(SamplerConfig(model_dir=model_dir, seed=3, threads=1, engine_process="own"))
    try:
        assert own.probe.tolist() == inside.probe.tolist()
        prompt = own.tokenizer.encode(QUERY)
        assert prompt.tolist() == inside.tokenizer.encode(QUERY).tolist()
        own.add(GenerationRequest("1.1", prompt, 4, TEMPERED))
        [finished] = own.step()
        drawn_inside = drawn(inside, QUERY, 4)
        for one, other in zip(finished.completions, drawn_inside, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
    finally:
        own.close()


async def test_rankings_that_cannot_be_are_refused_by_a_learner_by_name_and_counted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model_dir = make_ranker(tmp_path / "model")
    engine = engine_of(model_dir)
    no_ranking = "completion 0 is not a ranking"

    def ranking(*ids: int) -> dict[str, object]:
        return {
            "token_ids": np.array(ids, np.int32),
            "behaviour_logprob": np.full(len(ids), -0.5, np.float32),
            "policy_version": np.zeros(len(ids), np.int32),
        }

    def with_first(running: RunningLearner, group_id: str, changes: dict[str, object]) -> RolloutGroup:
        first, second, *_ = group_of(engine, QUERY).completions
        return replace(
            running.delivered(group_id),
            prompt_token_ids=engine.tokenizer.encode(QUERY),
            completions=(replace(first, **changes), replace(second, reward=0.25)),  # type: ignore[arg-type]
            sampling=TEMPERED,
        )

    wrong: dict[str, tuple[dict[str, object], str]] = {
        "1.1": (ranking(0, 1, 1), no_ranking),
        "2.1": (ranking(0, 1, 3), "where 3 of 3 are to be ranked"),
        "3.1": (ranking(0, 1), no_ranking),
        "4.1": (ranking(2, 1, 0, 0), no_ranking),
        "5.1": ({"behaviour_logprob": np.full(3, np.nan, np.float32)}, "logprob that is not finite"),
        "6.1": ({"reward": float("inf")}, "reward inf"),
    }
    async with scripted_hub() as hub, learner(hub, model_dir, tmp_path / "state") as running:
        bad = [with_first(running, name, changes) for name, (changes, _) in wrong.items()]
        not_asked = np.array([5, 6, SEPARATOR], np.int32)
        bad.append(replace(with_first(running, "7.1", {}), prompt_token_ids=not_asked))
        await hub.give(*bad, *(with_first(running, name, {}) for name in ("8.1", "9.1")))
        await hub.wait_until(lambda: len(hub.verdicts) >= 9)
        assert [hub.verdicts_of(group.group_id) for group in bad] == [[Verdict.MALFORMED]] * 7
        await hub.wait_until(lambda: hub.trained_group_ids == ["8.1", "9.1"])
        assert running.shown("groups_total", verdict="malformed") == 7
    told = {record.group_id: record.detail for record in caplog.records if record.message == "group refused"}  # type: ignore[attr-defined]
    for name, (_, says) in wrong.items():
        assert says in told[name]
    assert "not a query and candidates" in told["7.1"]


async def test_a_real_learner_teaches_a_ranker_which_candidate_is_relevant(
    made: MadeRun, tmp_path: Path
) -> None:
    model_dir = make_ranker(tmp_path / "model")
    draw = random.Random(0)
    rows = []
    for _ in range(64):
        candidates = [draw.choice("abc") + str(n) for n in range(5)]
        relevant = draw.randrange(5)
        candidates[relevant] = f"z{relevant}"
        relevance = [float(n == relevant) for n in range(5)]
        rows.append({"query": "find", "candidates": candidates, "relevance": relevance})
    rows[7]["relevance"] = [1.0]  # one number for five candidates
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = {
        "task": "ranking",
        "prompts": None,
        "data": {"file": tmp_path / "rows.jsonl"},
        "max_new_tokens": 8,
        "group_size": 8,
        "batch_groups": 8,
    }
    async with (
        running_hub(made, **settings) as hub,
        verifying(made, hub.address, model_dir) as verifier,
        sampling(made, hub.address, model_dir) as sampler,
    ):
        await until(lambda: sampler.registry.get_sample_value("heterorl_sampler_held_version") is not None)
        assert await learn(made, hub.address, model_dir, versions=16) is ExitCode.DRAINED
        assert verifier.value("checks_total", outcome="agreed") > 0
        odd = ("disagreed", "ungradable", "skipped")
        assert [verifier.value("checks_total", outcome=outcome) for outcome in odd] == [0, 0, 0]
        # The wrong row was never leased: no sampler failed it.
        assert hub.metric("heterorl_coordinator_prompt_faults_total", reason="prompt_failed") == 0
        async with hub.peer() as asking:
            assert not (await asking.status()).bad_prompts
    assert has_learnt(made, versions=16)


def test_a_classifier_of_several_labels_is_no_ranker(tmp_path: Path) -> None:
    config = json.loads((make_ranker(tmp_path) / "config.json").read_bytes())
    del config["id2label"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "id2label": {"0": "a", "1": "b"}}))
    with cannot_start("2 labels"):
        load_policy(tmp_path, device="cpu")
