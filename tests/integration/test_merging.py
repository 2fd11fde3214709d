"""A learner that merges, with contributors that take real steps, over real streams."""

import json
import math
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from heterorl.v1 import merge_pb2, merge_pb2_grpc
from learner.config import LearnerConfig
from learner.masters.master_words import root_of
from node.errors import Reason, StartupError
from node.identity.peer import Peer
from node.rpc.call_ends import classified
from node.rpc.channel import Purpose, dial
from node.values.groups.verdict import Verdict
from node.values.roles import Role
from support.contributing import contributor
from support.groups import with_rewards
from support.refusals import refused
from support.training_loop import BATCH, RunningLearner, Start, learner
from support.waiting import until

EXACT = {
    "listen": "127.0.0.1:0",
    "restart_wait_s": 0.0,
    "method": "in_step",
    "compression": "full",
}


@pytest.fixture
def merges(start: Start) -> Start:
    """Start learners that merge, and wait until contributors can reach them."""

    @asynccontextmanager
    async def merging(merge: dict[str, Any] | None = None, **settings: Any) -> AsyncIterator[RunningLearner]:
        async with start(merge=EXACT | (merge or {}), **settings) as running:
            await served(running)
            yield running

    return merging


async def served(running: RunningLearner) -> None:
    server = running.server
    assert server is not None
    await until(lambda: not server.address.endswith(":0"))
    await running.told.settings()


async def not_merging(running: RunningLearner, model_dir: Path, state: Path) -> None:
    """Start a learner that takes steps itself where one has merged, as if that was killed."""
    shutil.rmtree(state / "checkpoints")
    async with learner(running.hub, model_dir, state):
        pass


async def test_a_learner_without_room_for_one_contribution_does_not_start(
    start: Start, model_dir: Path
) -> None:
    async with start(merge=EXACT | {"local_steps": 5}) as merging:
        with pytest.raises(StartupError) as refusal:
            await merging.tasks[1]
    for name in ("learner.buffer_groups", "learner.merge.local_steps", "10"):
        assert name in str(refusal.value)


def test_a_learner_of_several_ranks_does_not_merge(model_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"learner\.merge") as refusal:
        LearnerConfig.model_validate(
            {"model_dir": model_dir, "learning_rate": 1e-3, "merge": EXACT, "dp_shard": 2}
        )
    assert all(name in str(refusal.value) for name in ("dp_shard", "2"))


async def test_one_contributor_in_step_makes_the_versions_that_a_learner_alone_makes(
    start: Start, model_dir: Path, tmp_path: Path
) -> None:
    roots: dict[str, list[bytes]] = {"alone": [], "merged": []}
    async with start() as alone:
        for onto in range(4):
            await alone.train(onto)
            roots["alone"].append(root_of(alone.policy.master_words))
        alone.hub.groups.clear()
        alone.hub.records.clear()
    async with learner(alone.hub, model_dir, tmp_path / "merging", merge=EXACT) as merging:
        await served(merging)
        async with contributor(merging, model_dir) as hand:
            for onto in range(4):
                await merging.give(*(f"{onto}{n}.1" for n in range(BATCH)), version=onto)
                await hand.say(*hand.trained([await hand.batch(BATCH)]))
                answer = await hand.heard_of("answer")
                assert (answer.number, answer.merged_version) == (onto + 1, onto + 1)
                await hand.credit(BATCH)
                roots["merged"].append(root_of(merging.policy.master_words))
        trained = [group["group_id"] for line in merging.lines for group in line["groups"]]
        assert trained == [f"{onto}{n}.1" for onto in range(4) for n in range(BATCH)]
    assert roots["merged"] == roots["alone"]


async def test_contributions_of_two_are_merged_in_equal_parts_and_every_group_once(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging:
        before = {name: one.detach().double() for name, one in merging.policy.parameters.items()}
        async with (
            contributor(merging, model_dir, "b") as b,
            contributor(merging, model_dir, "a", credit=BATCH) as a,
        ):
            await merging.give("1.1", "2.1", "3.1", "4.1")
            sent = [one.trained([await one.batch(BATCH)]) for one in (b, a)]
            await b.say(*sent[0])
            await until(lambda: merging.waits_for == "contributions: a (1 of 2 in)")
            assert merging.loop.version == 0
            assert (merging.shown("awaited_seconds", contributor="a") or 0) > 0
            assert merging.shown("awaited_seconds", contributor="b") is None
            await a.say(*sent[1])
            for one in (a, b):
                assert (await one.heard_of("answer")).merged_version == 1
            for name, now in merging.policy.parameters.items():
                mean = (a.policy.parameters[name].double() + b.policy.parameters[name].double()) / 2
                torch.testing.assert_close(now.detach().double(), mean, atol=1e-7, rtol=0)
                assert not torch.equal(mean, before[name]) or not mean.any()
            assert merging.shown("contributors") == 2
            for name in ("a", "b"):
                assert merging.shown("contributions_total", contributor=name, outcome="merged") == 1
                assert (merging.shown("contribution_bytes_total", contributor=name) or 0) > 0
                assert -1 <= (merging.shown("change_cosine", contributor=name) or 0) <= 1
        await until(lambda: len(merging.hub.records) == 1)
        assert sorted(merging.hub.trained_group_ids) == ["1.1", "2.1", "3.1", "4.1"]
        (line,) = merging.lines
        assert line["tokens"] > 0
        assert (line["merged_contributions"], line["merged_norm"] > 0) == (2, True)
        assert line["merged_cosine_min"] == min(
            merging.shown("change_cosine", contributor=name) or 0 for name in ("a", "b")
        )


async def test_a_contribution_that_cannot_be_taken_now_ends_its_stream(
    merges: Start, model_dir: Path
) -> None:
    async with (
        merges() as merging,
        contributor(merging, model_dir, "a") as a,
        contributor(merging, model_dir, "b") as b,
    ):
        await merging.give("1.1", "2.1", "3.1", "4.1")
        await b.batch(BATCH)
        await a.say(*a.trained([await a.batch(BATCH)]))
        a.number += 1
        await a.say(*a.contribution(b"{}", b"another"))
        with refused(Reason.BUSY, "2", "1"):
            await a.heard_of("answer")


@pytest.mark.parametrize("report", [b"{", b'{"steps": []}', b"[" * 100_000], ids=["cut", "other", "deep"])
async def test_a_contribution_that_is_not_what_its_header_says_ends_the_stream(
    merges: Start, model_dir: Path, report: bytes
) -> None:
    async with merges() as merging, contributor(merging, model_dir) as hand:
        hand.number = 7
        header, *parts = hand.contribution(report, b"change")
        if report.endswith(b"}"):
            header.contribution.digest = bytes(16)
        await hand.say(header, *parts)
        with refused(Reason.MALFORMED, "7"):
            await hand.heard_of("answer")
        assert merging.shown("held_payload_bytes") == 0


LIES: dict[str, Callable[[Any], object]] = {
    "a foreign group": lambda step: step["groups"][0].update(group_id="9.1"),
    "a group twice": lambda step: step["groups"].__setitem__(0, step["groups"][1]),
    "too many tokens": lambda step: step["numbers"].update(tokens=1 << 40),
    "fewer tokens clamped than none": lambda step: step["numbers"].update(clamped_tokens=-5),
    "more positions than a float has": lambda step: step["numbers"].update(read_tokens=10**400),
    "a rate that is no number": lambda step: step["numbers"].update(learning_rate=math.nan),
    "a broken payload": lambda _: None,
    "a change larger than the model": lambda _: None,
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_contribution_that_lies_is_refused_whole_and_its_groups_are_dealt_again(
    start: Start, merges: Start, model_dir: Path, lie: str
) -> None:
    async with merges() as merging:
        async with contributor(merging, model_dir, "a") as a:
            await merging.give("1.1", "2.1")
            header = a.trained([await a.batch(BATCH)])[0].contribution
            payload = b"".join(one.payload for one in a.sent[1:])
            report = json.loads(header.report)
            LIES[lie](report["steps"][0])
            if lie == "a broken payload":
                payload = payload[:-1]
            if lie == "a change larger than the model":
                a.instead({name: 1e30 * one.detach() for name, one in a.policy.parameters.items()})
                payload = b"".join(one.payload for one in a.sent[1:])
            await a.say(*a.contribution(json.dumps(report).encode(), payload))
            answer = await a.heard_of("answer")
            assert not answer.HasField("merged_version")
            assert answer.detail
            await a.credit(BATCH)
            a.restart(model_dir)
            a.number = 1
            await a.say(*a.trained([await a.batch(BATCH)]))
            assert (await a.heard_of("answer")).merged_version == 1
        await until(lambda: len(merging.hub.records) == 1)
        assert sorted(merging.hub.trained_group_ids) == ["1.1", "2.1"]


async def test_the_groups_of_a_contributor_that_is_gone_are_dealt_to_another(
    merges: Start, model_dir: Path
) -> None:
    async with merges({"member_timeout_s": 1.0}) as merging:
        async with contributor(merging, model_dir, "a") as a:
            await merging.give("1.1", "2.1")
            await a.batch(BATCH)
        async with contributor(merging, model_dir, "b") as b:
            await b.say(*b.trained([await b.batch(BATCH)]))
            assert (await b.heard_of("answer")).merged_version == 1
            await a.connect()
            assert sorted((await a.heard_of("taken")).group_ids) == ["1.1", "2.1"]
            await a.disconnect()


async def test_a_contribution_of_a_contributor_that_was_revoked_is_not_merged_and_others_get_its_groups(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging:
        async with (
            contributor(merging, model_dir, "a", credit=BATCH) as a,
            contributor(merging, model_dir, "b") as b,
        ):
            await merging.give("1.1", "2.1", "3.1", "4.1")
            await a.say(*a.trained([await a.batch(BATCH)]))
            await b.batch(BATCH)
            await until(lambda: merging.shown("change_norm", contributor="a") is not None)
            merging.revoked.add("a")
            with refused(Reason.REVOKED, "a"):
                await a.heard_of("answer")
            await b.batch(2 * BATCH)
            for version in (1, 2):
                await b.say(*b.trained([await b.batch(BATCH)]))
                assert (await b.heard_of("answer")).merged_version == version
            assert merging.shown("contributions_total", contributor="a", outcome="revoked") == 1
        await until(lambda: len(merging.hub.trained_group_ids) == 4)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
async def test_a_learner_killed_after_the_record_comes_back_with_the_same_root_and_the_same_answer(
    merges: Start, model_dir: Path, tmp_path: Path, momentum: float
) -> None:
    merge = EXACT | {"outer_momentum": momentum}
    async with merges(merge) as merging, contributor(merging, model_dir, "a") as a:
        for onto in range(2):
            await merging.give(f"{onto}1.1", f"{onto}2.1", version=onto)
            sent = a.trained([await a.batch(BATCH)])
            await a.say(*sent)
            assert (await a.heard_of("answer")).merged_version == onto + 1
            await a.credit(BATCH)
        root = root_of(merging.policy.master_words)
        killed = tmp_path.parent / f"{tmp_path.name}-killed"
        shutil.copytree(tmp_path, killed)
        # A hub that never heard of the step: the record is sent again.
        merging.hub.records.clear()
        async with learner(merging.hub, model_dir, killed, merge=merge) as again:
            await served(again)
            assert again.loop.version == again.state.restart.replayed_steps == 2
            assert root_of(again.policy.master_words) == root
            a.running = again
            await a.disconnect()
            await a.connect(["11.1", "12.1"])
            await a.say(*sent)
            assert (await a.heard_of("answer")).merged_version == 2
        with pytest.raises(StartupError, match="merge"):
            await not_merging(merging, model_dir, killed)


async def test_a_learner_killed_before_the_record_finds_its_groups_with_their_contributors(
    merges: Start, model_dir: Path, tmp_path: Path
) -> None:
    waits = EXACT | {"restart_wait_s": 2.0}
    async with (
        merges() as merging,
        contributor(merging, model_dir, "a") as a,
        contributor(merging, model_dir, "b") as b,
    ):
        await merging.give("1.1", "2.1", "3.1", "4.1")
        held = [group.group_id for group in await a.batch(BATCH)]
        sent = a.trained([list(a.held.values())])
        await b.batch(BATCH)
        await a.say(*sent)
        await until(lambda: (merging.shown("held_payload_bytes") or 0) > 0)
        killed = tmp_path.parent / f"{tmp_path.name}-killed"
        shutil.copytree(tmp_path, killed)
        async with learner(merging.hub, model_dir, killed, merge=waits) as again:
            await served(again)
            a.running = b.running = again
            for one, ids in ((a, held), (b, list(b.held))):
                await one.disconnect()
                await one.connect(ids)
            await a.say(*sent)
            await b.say(*b.trained([list(b.held.values())]))
            assert (await a.heard_of("answer")).merged_version == 1
            assert (await b.heard_of("answer")).merged_version == 1
            await until(lambda: len(again.hub.records) == 1)
            assert sorted(again.hub.trained_group_ids) == ["1.1", "2.1", "3.1", "4.1"]


async def test_the_newest_stream_of_a_contributor_stays(merges: Start, model_dir: Path) -> None:
    async with (
        merges() as merging,
        contributor(merging, model_dir, "a") as older,
        contributor(merging, model_dir, "a") as newer,
    ):
        with refused(Reason.DUPLICATE, "a"):
            await older.heard_of("group")
        await merging.give("1.1", "2.1")
        await newer.say(*newer.trained([await newer.batch(BATCH)]))
        assert (await newer.heard_of("answer")).merged_version == 1


async def test_a_hello_without_a_model_is_refused_and_takes_no_stream_over(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging, contributor(merging, model_dir, "a") as a:
        asks = Peer("run", Role.CONTRIBUTOR, "a")
        assert merging.server is not None
        address = merging.server.address
        async with dial(address, asks, purpose=Purpose.CONTRIBUTIONS, now=0.0) as channel:
            hello = merge_pb2.ContributeRequest(hello=merge_pb2.ContributorHello())
            with refused(Reason.LAYOUT_MISMATCH), classified():
                async for _ in merge_pb2_grpc.MergeServiceStub(channel).Contribute(iter([hello])):
                    pass
        await merging.give("1.1", "2.1")
        await a.say(*a.trained([await a.batch(BATCH)]))
        assert (await a.heard_of("answer")).merged_version == 1


async def test_groups_that_taught_nothing_are_consumed_by_a_verdict_and_make_no_version(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging, contributor(merging, model_dir, "a") as a:
        await merging.hub.give(
            *(merging.delivered(one, completions=with_rewards(1.0, spread=0.0)) for one in ("1.1", "2.1"))
        )
        await a.say(*a.trained([await a.batch(BATCH)]))
        assert (await a.heard_of("answer")).merged_version == 0
        hub = merging.hub
        told = [Verdict.ACCEPTED, Verdict.UNINFORMATIVE]
        await hub.wait_until(lambda: hub.verdicts_of("1.1") == hub.verdicts_of("2.1") == told)
        assert merging.loop.version == 0
        teaching = merging.evidence.teaching
        assert teaching is not None
        assert (teaching.groups, teaching.uninformative_groups, teaching.reward_mean) == (2, 2, 1.0)
        assert merging.shown("uninformative_batches_total") == 1
        await a.credit(BATCH)
        await merging.give("3.1", "4.1")
        await a.say(*a.trained([await a.batch(BATCH)]))
        assert (await a.heard_of("answer")).merged_version == 1
        teaching = merging.evidence.teaching
        assert teaching is not None
        assert (teaching.groups, teaching.uninformative_groups, teaching.idle_s) == (4, 2, 0.0)


async def test_a_contributors_word_that_a_gradient_was_not_finite_is_held_against_no_sampler(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging, contributor(merging, model_dir, "a") as a:
        await merging.give("1.1", "2.1")
        report = json.loads(a.trained([await a.batch(BATCH)])[0].contribution.report)
        report["not_finite"] = report["steps"].pop()["groups"]
        await a.say(*a.contribution(json.dumps(report).encode(), b""))
        assert (await a.heard_of("answer")).merged_version == 0
        hub = merging.hub
        told = [Verdict.ACCEPTED, Verdict.UNINFORMATIVE]
        await hub.wait_until(lambda: hub.verdicts_of("1.1") == hub.verdicts_of("2.1") == told)


async def test_groups_that_only_one_says_taught_nothing_are_trained_on_by_another(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging:
        async with (
            contributor(merging, model_dir, "a", credit=BATCH) as a,
            contributor(merging, model_dir, "b") as b,
        ):
            await merging.give("1.1", "2.1", "3.1", "4.1")
            own = await a.batch(BATCH)
            report = json.loads(a.trained([own])[0].contribution.report)
            report["uninformative"] = report["steps"].pop()["groups"]
            await a.say(*a.contribution(json.dumps(report).encode(), b""))
            await b.say(*b.trained([await b.batch(BATCH)]))
            for one in (a, b):
                assert (await one.heard_of("answer")).merged_version == 1
            assert {one.group_id for one in await b.batch(BATCH)} == {one.group_id for one in own}
            await b.say(*b.trained([list(b.held.values())]))
            assert (await b.heard_of("answer")).merged_version == 2
            assert merging.shown("doubted_groups_total", contributor="a") == BATCH
        await until(lambda: len(merging.hub.trained_group_ids) == 4)


async def test_rounds_of_solved_groups_alone_end_a_run_at_its_goal(merges: Start, model_dir: Path) -> None:
    async with (
        merges(stop_at_reward=1.0, stop_window_versions=2) as merging,
        contributor(merging, model_dir, "a") as a,
    ):
        for ids in (("1.1", "2.1"), ("3.1", "4.1")):
            assert not merging.state.completion
            await merging.give(*ids, completions=with_rewards(1.0, spread=0.0))
            await a.say(*a.trained([await a.batch(BATCH)]))
            await a.heard_of("answer")
            await a.credit(BATCH)
        await until(lambda: bool(merging.state.completion))


async def test_the_median_of_three_is_what_two_of_them_say(merges: Start, model_dir: Path) -> None:
    async with merges({"combine": "median"}) as merging:
        before = {name: one.detach().clone() for name, one in merging.policy.parameters.items()}
        async with (
            contributor(merging, model_dir, "a", credit=BATCH) as a,
            contributor(merging, model_dir, "b", credit=BATCH) as b,
            contributor(merging, model_dir, "liar", credit=BATCH) as liar,
        ):
            await merging.give("1.1", "2.1", "3.1", "4.1", "5.1", "6.1")
            for one, change in ((a, 1e-2), (liar, -1e-2), (b, 2e-2)):
                one.trained([await one.batch(BATCH)])
                await one.say(
                    *one.instead({name: torch.full_like(at, change) for name, at in before.items()})
                )
            for one in (a, b, liar):
                assert (await one.heard_of("answer")).merged_version == 1
        for name, now in merging.policy.parameters.items():
            torch.testing.assert_close(now.detach(), before[name] + 1e-2)


async def test_a_contribution_that_waits_at_a_checkpoint_is_in_the_version_after_it(
    merges: Start, model_dir: Path
) -> None:
    async with merges() as merging, contributor(merging, model_dir, "a") as a:
        await merging.give("1.1", "2.1")
        await a.say(*a.trained([await a.batch(BATCH)]))
        await a.heard_of("answer")
        async with contributor(merging, model_dir, "b", credit=BATCH) as b:
            await merging.give("3.1", "4.1", "5.1", "6.1", version=1)
            await b.batch(BATCH)
            held = [group.group_id for group in await a.batch(BATCH)]
            sent = a.trained([list(a.held.values())])
            await a.say(*sent)
            await until(lambda: (merging.shown("held_payload_bytes") or 0) > 0)
    async with merges({"restart_wait_s": 2.0}) as again:
        assert (again.loop.version, again.state.restart.replayed_steps) == (1, 0)
        a.running = b.running = again
        await a.connect(held)
        await b.connect()
        await a.say(*sent)
        b.version = 1
        await b.say(*b.trained([list(b.held.values())]))
        for one in (a, b):
            assert (await one.heard_of("answer")).merged_version == 2
            await one.disconnect()
        await until(lambda: len(again.hub.records) == 2)
        assert sorted(again.hub.trained_group_ids) == [f"{number}.1" for number in range(1, 7)]


async def test_norms_that_grow_lower_the_rate_for_good_and_a_restart_replays_it(
    merges: Start, model_dir: Path, tmp_path: Path
) -> None:
    merge = EXACT | {"outer_rate": 0.8, "outer_momentum": 0.2}
    async with merges(merge) as merging:
        async with contributor(merging, model_dir, "a") as a:
            for onto in range(18):
                before = {name: one.detach().clone() for name, one in merging.policy.parameters.items()}
                change = 1e-7 * 2**onto
                await merging.give(f"{onto}1.1", f"{onto}2.1", version=onto)
                a.trained([await a.batch(BATCH)])
                await a.say(*a.instead({name: torch.full_like(one, change) for name, one in before.items()}))
                assert (await a.heard_of("answer")).merged_version == onto + 1
                await a.credit(BATCH)
            for name, now in merging.policy.parameters.items():
                torch.testing.assert_close(now.detach() - before[name], torch.full_like(now, change / 2))
        assert (merging.shown("outer_rate"), merging.shown("merges_diverge")) == (0.5, 1)
        changed = {line["version"]: line["changed_settings"] for line in merging.lines}
        assert [version for version, settings in changed.items() if settings] == [17]
        assert changed[17] == {"merge.outer_momentum": ["0.2", "0.0"], "merge.outer_rate": ["0.8", "0.5"]}
        root = root_of(merging.policy.master_words)
        killed = tmp_path.parent / f"{tmp_path.name}-killed"
        shutil.copytree(tmp_path, killed)
        for asked, rate, diverges in (({}, 0.5, 1), ({"outer_rate": 0.9}, 0.9, 0)):
            async with learner(merging.hub, model_dir, killed, merge=merge | asked) as again:
                await served(again)
                assert root_of(again.policy.master_words) == root
                assert (again.shown("outer_rate"), again.shown("merges_diverge")) == (rate, diverges)
