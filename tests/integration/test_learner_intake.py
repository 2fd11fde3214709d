"""Groups as a learner judges them, over a real socket: refused, evicted, and what they show of samplers."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest

from learner.intake import copies
from learner.training import group_intake
from node.values.groups.rollout import EncodedGroup, RolloutGroup
from node.values.groups.verdict import Verdict
from node.wire import rollouts
from support.groups import SAMPLING, make_completion
from support.training_loop import RUN, Start
from support.waiting import until


async def test_refused_groups_are_said_why_and_leave_room_for_others(start: Start) -> None:
    async with start(buffer_groups=2) as running:
        lying = (make_completion(3, behaviour_logprob=np.full(3, -99.0, np.float32)), make_completion(3))
        await running.hub.give(
            running.delivered("0.1", run_id="another"),
            running.delivered("1.1", completions=lying),
            running.delivered("2.1", sampling=replace(SAMPLING, top_k=20)),
            running.delivered("3.1", version=1),
            running.delivered("6.1", source=EncodedGroup(b"header", b"columns", "6.1")),
            running.delivered("4.1"),
            running.delivered("5.1"),
        )
        await running.hub.wait_until(lambda: len(running.hub.records) == 1)
        assert running.hub.trained_group_ids == ["4.1", "5.1"]
        refused = {name: said for name, said in running.hub.verdicts if said is not Verdict.ACCEPTED}
        assert refused == {
            "0.1": Verdict.FOREIGN,
            "1.1": Verdict.SUSPECT,
            "2.1": Verdict.FOREIGN,
            "3.1": Verdict.FOREIGN,
            "6.1": Verdict.MALFORMED,
        }
        for verdict, counted in (("malformed", 1), ("foreign", 3), ("suspect", 1)):
            assert running.shown("groups_total", verdict=verdict) == counted
        assert running.shown("buffered_groups") == 0


async def test_groups_are_read_in_the_training_thread_and_those_of_a_quarantined_sampler_not_at_all(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the event loop a large one would hold heartbeats up."""
    read: dict[str, str] = {}

    def group_from_wire(encoded: EncodedGroup) -> RolloutGroup:
        read[encoded.group_id] = threading.current_thread().name
        return rollouts.group_from_wire(encoded)

    monkeypatch.setattr(group_intake, "group_from_wire", group_from_wire)
    async with start() as running:
        running.drain.quarantine("liar", "its rewards are not its grader's")
        await running.train(0)
        await running.give("2.1", sampler_id="liar")
        await running.hub.wait_until(lambda: running.hub.verdicts_of("2.1") == [Verdict.SUSPECT])
    assert [*read] == ["00.1", "01.1"]
    assert {thread.partition("_")[0] for thread in read.values()} == {"training"}


async def test_a_sampler_whose_fresh_logprobs_are_not_the_learners_is_no_longer_believed(
    start: Start,
) -> None:
    """Every token is claimed to be likely, -0.5 nats, from the version the learner holds."""
    async with start(quarantine_mismatch_nats=0.2) as running:
        await running.train(0)
        await running.train(1)
        await running.give("9.1", version=2)
        await running.hub.wait_until(lambda: running.hub.verdicts_of("9.1") == [Verdict.SUSPECT])
        assert "nats a token further from the learner" in running.hub.quarantined["sampler-a"]


async def test_a_learner_is_told_of_a_quarantine_at_its_start_and_tells_of_one_again_after_a_cut(
    start: Start,
) -> None:
    async with start() as running:
        hub = running.hub
        await hub.wait_until(lambda: len(hub.hellos) == 1)
        hub.quarantined = {"sampler-a": "off before this learner started"}
        await hub.cut()
        await hub.wait_until(lambda: len(hub.hellos) >= 2)
        await until(lambda: "sampler-a" in running.drain.quarantined)
        await hub.give(running.delivered("0.1"), running.delivered("1.1", sampler_id="sampler-b"))
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.SUSPECT])
        await hub.wait_until(lambda: hub.verdicts_of("1.1") == [Verdict.ACCEPTED])
        running.drain.quarantine("sampler-b", "off")
        await hub.wait_until(lambda: hub.quarantined.get("sampler-b") == "off")
        hub.quarantined.clear()
        await hub.cut()
        await hub.wait_until(lambda: hub.quarantined.get("sampler-b") == "off")


async def test_groups_that_wait_are_given_up_once_their_sampler_is_quarantined(start: Start) -> None:
    async with start() as running:
        hub = running.hub
        await running.give("0.1", sampler_id="liar")
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.ACCEPTED])
        running.drain.quarantine("liar", "its rewards are not its grader's")
        await running.give("1.1", "2.1")
        await hub.wait_until(lambda: len(hub.records) == 1)
        assert hub.trained_group_ids == ["1.1", "2.1"]
        assert hub.verdicts_of("0.1") == [Verdict.ACCEPTED, Verdict.SUSPECT]


async def test_whoever_hands_in_copies_trains_nothing_and_is_quarantined(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "LEAST_NATS", 0.1)  # a test's completions are short, and all the same
    prompt = np.array([1, 2, 3], np.int32)
    async with start() as running:
        hub = running.hub
        await running.give("0.1", prompt_token_ids=prompt)
        await hub.wait_until(lambda: hub.verdicts_of("0.1") == [Verdict.ACCEPTED])
        names = [f"{n}.1" for n in range(1, copies.COPIES + 1)]
        await running.give(*names, sampler_id="copier", prompt_token_ids=prompt)
        await hub.wait_until(lambda: all(hub.verdicts_of(name) == [Verdict.SUSPECT] for name in names))
        await hub.wait_until(
            lambda: "of group 0.1, which sampler-a drew" in hub.quarantined.get("copier", "")
        )
        assert "sampler-a" not in hub.quarantined
        assert hub.records == []


async def test_divergence_by_age_is_shown_and_a_staleness_bound_recommended_once_two_ages_are_known(
    start: Start,
) -> None:
    async with start(run=replace(RUN, batch_groups=8)) as running:

        def shown(what: str, age_versions: int | None = None) -> float:
            labels = {} if age_versions is None else {"age_versions": str(age_versions)}
            return running.shown(what, **labels) or 0.0

        for made in range(2):
            assert math.isnan(shown("recommended_staleness_versions"))
            await running.train(made, groups=8, version=0)
        await until(lambda: not math.isnan(shown("recommended_staleness_versions")))
        assert min(shown("drift_nats", 1), shown("drift_error_nats", 1)) > 0
        assert 0 < shown("expected_ess_ratio", 1) < 1
        assert math.isnan(shown("drift_nats", 64))
        assert math.isnan(shown("expected_ess_ratio", 64))
        bound = shown("recommended_staleness_versions")
        await until(lambda: len(running.lines) == 2)
    first, second = (line["recommended_staleness"] for line in running.lines)
    assert first["versions"] is None
    assert "about 0 versions old" in first["unknown_because"]
    assert second == {"versions": bound, "sample": "token weights", "unknown_because": ""}
