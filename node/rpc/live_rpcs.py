"""The rpcs a server is serving now: how many each peer has, ending them, waiting for the last one."""

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from node.errors import RefusedError
from node.identity.peer import Peer
from node.rpc.auth import Rule


@dataclass(slots=True, eq=False)
class LiveRpc:
    """An rpc that was admitted and has not ended."""

    method: str
    rule: Rule
    peer: Peer | None
    """None where the rpc asks for no certificate."""
    not_after_s: float
    """When the caller's certificate expires, Unix seconds."""
    task: asyncio.Task[None]
    ended_by: RefusedError | None = None
    """Why the server ended it; None while it has not."""

    @property
    def name(self) -> tuple[str, str]:
        """Return who calls what; all strangers are one."""
        return "" if self.peer is None else self.peer.node_id, self.method

    def end(self, refusal: RefusedError) -> None:
        """Cancel the servicer; the caller is sent ``refusal``."""
        if self.ended_by is None:
            self.ended_by = refusal
            self.task.cancel()


class LiveRpcs:
    """All live rpcs of one server."""

    def __init__(self) -> None:
        self._rpcs: set[LiveRpc] = set()
        self._of_peer: Counter[str] = Counter()
        self._idle = asyncio.Event()
        self._idle.set()

    def __len__(self) -> int:
        return len(self._rpcs)

    @property
    def methods(self) -> list[str]:
        """Return the methods that are being served, each once, sorted."""
        return sorted({rpc.method for rpc in self._rpcs})

    def number_of(self, peer: Peer) -> int:
        """Return how many rpcs of a peer are live."""
        return self._of_peer[peer.node_id]

    def add(self, rpc: LiveRpc) -> None:
        """Count an rpc until ``remove``."""
        self._rpcs.add(rpc)
        self._idle.clear()
        if rpc.peer is not None:
            self._of_peer[rpc.peer.node_id] += 1

    def remove(self, rpc: LiveRpc) -> None:
        """Count an rpc no longer: it has ended."""
        self._rpcs.remove(rpc)
        if not self._rpcs:
            self._idle.set()
        if rpc.peer is not None:
            self._of_peer[rpc.peer.node_id] -= 1
            if not self._of_peer[rpc.peer.node_id]:
                del self._of_peer[rpc.peer.node_id]

    def end_each(self, refusal_of: Callable[[LiveRpc], RefusedError | None]) -> None:
        """End the rpcs for which ``refusal_of`` returns a refusal."""
        for rpc in tuple(self._rpcs):
            refusal = refusal_of(rpc)
            if refusal is not None:
                rpc.end(refusal)

    async def wait_until_none(self) -> None:
        """Wait until no rpc is live."""
        await self._idle.wait()
