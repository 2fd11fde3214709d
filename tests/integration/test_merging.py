"""A learner that merges, with contributors that take real steps, over real streams."""

from pathlib import Path

from learner.masters.master_words import root_of
from support.contributing import contributor
from support.training_loop import BATCH, RunningLearner, Start, learner
from support.waiting import until

EXACT = {
    "listen": "127.0.0.1:0",
    "restart_wait_s": 0.0,
    "method": "in_step",
    "compression": "full",
}


async def served(running: RunningLearner) -> None:
    server = running.server
    assert server is not None
    await until(lambda: not server.address.endswith(":0"))
    await running.told.settings()


async def test_one_contributor_in_step_makes_the_versions_that_a_learner_alone_makes(
    start: Start, model_dir: Path, tmp_path: Path
) -> None:
    roots: dict[str, list[bytes]] = {"alone": [], "merged": []}
    async with start() as alone:
        for onto in range(10):
            await alone.train(onto)
            roots["alone"].append(root_of(alone.policy.master_words))
        alone.hub.groups.clear()
        alone.hub.records.clear()
    async with learner(alone.hub, model_dir, tmp_path / "merging", merge=EXACT) as merging:
        await served(merging)
        async with contributor(merging, model_dir) as hand:
            for onto in range(10):
                await merging.give(*(f"{onto}{n}.1" for n in range(BATCH)), version=onto)
                await hand.say(*hand.trained([await hand.batch(BATCH)]))
                answer = await hand.heard_of("answer")
                assert (answer.number, answer.merged_version) == (onto + 1, onto + 1)
                assert (await hand.heard_of("merged")).version == onto + 1
                await hand.credit(BATCH)
                roots["merged"].append(root_of(merging.policy.master_words))
        await until(lambda: len(merging.hub.records) == 10)
        assert merging.hub.trained_group_ids == [f"{onto}{n}.1" for onto in range(10) for n in range(BATCH)]
    assert roots["merged"] == roots["alone"]
