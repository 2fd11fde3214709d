"""Orders that are given while the coordinator is away, which the next one carries out."""

from pathlib import Path

from heterorl.v1 import rollout_pb2
from node.coordinator.ledger.ledger_export import rows
from node.coordinator.ledger.ledger_file import FILE_NAME
from node.errors import Reason
from support.by_rpc import refusal_of, say
from support.enrolled import let_in
from support.hub import joined, running_hub
from support.identity import MadeRun


def carried_out(made: MadeRun) -> dict[str, bool]:
    orders = rows(made.directory / "coordinator" / FILE_NAME, "order")
    return {f"{order['verb']} {order['about']}".rstrip(): order["is_carried_out"] for order in orders}


async def test_orders_given_while_the_coordinator_is_away_are_carried_out_by_the_next_one(
    made: MadeRun,
) -> None:
    fault = rollout_pb2.LEASE_FAULT_PROMPT_FAILED
    for name in ("sampler-1", made.other_sampler.node_id):
        let_in(made.directory, name)
    async with joined(made, made.sampler, made.other_sampler) as (_, learner, sampler, other):
        (held,) = (await other.lease()).leases
        (failed,) = (await sampler.lease()).leases
        failure = rollout_pb2.FailedLease(lease_id=failed.lease_id, fault=fault)
        await sampler.rollout.ReleaseLeases(rollout_pb2.ReleaseLeasesRequest(failed=[failure]))
        assert (await learner.status()).bad_prompts_total == 1
    await say(made, "pause", "--because", "we look at it")
    await say(made, "pardon", "all")
    await say(made, "revoke", made.other_sampler.node_id)
    assert not any(carried_out(made).values())
    async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join()
        await sampler.join()
        assert (await learner.status()).bad_prompts_total == 0
        assert (await sampler.lease()).waits_for == "paused"
        async with hub.peer(made.other_sampler) as other:
            assert (await refusal_of(other.join())).reason is Reason.REVOKED
        assert dict((await learner.status()).slots)["leased"] == 0
        assert held.lease_id
    assert all(carried_out(made).values())


async def test_files_of_release_0_3_are_read_once_and_set_aside(made: MadeRun, tmp_path: Path) -> None:
    state = made.directory / "coordinator"
    (state / "held_back").write_text("all  # 2026-11-01 10:00:00 UTC the judge is down\nsampler-9  # moves\n")
    (state / "revoked").write_text(f"# by hand\n{made.sampler.node_id}  # its disk was sold")
    (state / "pardoned").write_text("sampler-8\n")
    async with running_hub(made) as hub, hub.peer() as learner, hub.peer(made.sampler) as sampler:
        await learner.join()
        assert (await refusal_of(sampler.join())).reason is Reason.REVOKED
        headline = (await learner.status()).headline
        assert "the judge is down" in headline.waits_for
        assert headline.for_s > 0
    assert carried_out(made) == dict.fromkeys(
        ("drain sampler-9", "pardon sampler-8", "pause", f"revoke {made.sampler.node_id}"), True
    )
    kept = sorted(path.name for path in state.glob("*.before-0.4"))
    assert kept == ["held_back.before-0.4", "pardoned.before-0.4", "revoked.before-0.4"]
    let_in(made.directory, made.sampler.node_id)
    await say(made, "revoke", "--undo", made.sampler.node_id)
    async with running_hub(made) as hub, hub.peer(made.sampler) as sampler:
        await sampler.join()
