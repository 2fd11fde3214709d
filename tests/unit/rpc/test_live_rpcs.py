"""Which rpcs a server is serving, how many each peer has, and how they are ended."""

import asyncio

import pytest

from node.errors import Reason, RefusedError
from node.identity.peer import Peer
from node.rpc.auth import RULES
from node.rpc.live_rpcs import LiveRpc, LiveRpcs
from node.run import Role

WATCH, FETCH = (f"/heterorl.v1.PolicyService/{name}" for name in ("WatchVersions", "FetchFrames"))
PEER, OTHER = (Peer("run", Role.SAMPLER, name) for name in ("s1", "s2"))
REFUSAL = RefusedError(Reason.DRAINING, "the hub is stopping")


async def rpc(method: str = WATCH, *, peer: Peer | None = PEER) -> LiveRpc:
    task = asyncio.get_running_loop().create_task(asyncio.Event().wait())
    return LiveRpc(method, RULES[method], peer, float("inf"), task)  # type: ignore[arg-type]


async def test_rpcs_are_counted_and_named_until_they_end() -> None:
    live = LiveRpcs()
    assert (len(live), live.methods) == (0, [])
    rpcs = [await rpc(WATCH), await rpc(FETCH), await rpc(WATCH)]
    for each in rpcs:
        live.add(each)
    assert (len(live), live.methods) == (3, [FETCH, WATCH])
    live.remove(rpcs[1])
    assert (len(live), live.methods) == (2, [WATCH])


async def test_the_rpcs_of_a_peer_are_its_own() -> None:
    live = LiveRpcs()
    rpcs = [await rpc(), await rpc(), await rpc(peer=OTHER), await rpc(peer=None)]
    for each in rpcs:
        live.add(each)
    assert [live.number_of(peer) for peer in (PEER, OTHER)] == [2, 1]
    live.remove(rpcs[0])
    live.remove(rpcs[3])
    assert [live.number_of(peer) for peer in (PEER, OTHER)] == [1, 1]
    live.remove(rpcs[1])
    assert [live.number_of(peer) for peer in (PEER, OTHER)] == [0, 1]


async def test_one_waits_until_the_last_rpc_has_ended() -> None:
    live = LiveRpcs()
    async with asyncio.timeout(5):
        await live.wait_until_none()
        first, second = await rpc(), await rpc()
        live.add(first)
        live.add(second)
        waiting = asyncio.ensure_future(live.wait_until_none())
        live.remove(first)
        await asyncio.sleep(0)
        assert not waiting.done()
        live.remove(second)
        await waiting


async def test_only_rpcs_with_a_refusal_are_ended_and_the_first_refusal_is_told() -> None:
    live = LiveRpcs()
    watch, fetch = await rpc(WATCH), await rpc(FETCH)
    live.add(watch)
    live.add(fetch)
    live.end_each(lambda each: REFUSAL if each.method == WATCH else None)
    live.end_each(lambda each: RefusedError(Reason.EXPIRED, "") if each.method == WATCH else None)
    assert (watch.ended_by, fetch.ended_by) == (REFUSAL, None)
    with pytest.raises(asyncio.CancelledError):
        await watch.task
    assert not fetch.task.cancelling()
    assert watch.task.cancelling() == 1
