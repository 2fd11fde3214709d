"""Operators' words about nodes while the coordinator runs, in files of its state directory.

revoked   read again whenever it changes: the coordinator frees what those nodes hold, see ``work.trust``
pardoned  written by `heterorl-node pardon`, taken away once the ledger has it
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from node.coordinator.learner_stream import LearnerStreams
from node.coordinator.run_ledger import RunLedger
from node.coordinator.work import trust
from node.coordinator.work.trust import NOTHING_UNDONE
from node.identity.files import write_public
from node.identity.peer import is_name
from node.identity.revocation import RevocationList

logger = logging.getLogger(__name__)

PARDONS: Final = "pardoned"

EVERYBODY: Final = "all"


def ask_pardon(path: Path, node_ids: Iterable[str]) -> None:
    """Add nodes to the file that a coordinator takes away; it need not run yet.

    Raises:
        OSError: the file cannot be read or written.
    """
    before = path.read_text(encoding="utf-8") if path.exists() else ""
    write_public(path, (before + "".join(f"{node_id}\n" for node_id in node_ids)).encode())


@dataclass(slots=True)
class TrustUpkeep:
    """Looks at the files, once a second."""

    ledger: RunLedger
    learners: LearnerStreams
    revocations: RevocationList
    pardons: Path
    share: Callable[[frozenset[str]], None] = lambda _: None
    """Tells the coordinators that may lead after this one who is shut out; blocks."""
    _settled: frozenset[str] = frozenset()
    """Nodes whose revocation the ledger has; all of them again after a start."""
    _shared: frozenset[str] = frozenset()

    async def turn(self) -> None:
        """Do what has been asked since the last turn.

        Raises:
            RefusedError: the ledger could not be written; the next turn tries again.
        """
        revoked = frozenset(self.revocations.current().node_ids)
        if fresh := revoked - self._settled:
            await self._revoke(fresh)
        if revoked != self._shared:
            await asyncio.to_thread(self.share, revoked)
            self._shared = revoked
        self._settled = revoked
        taken = self.pardons.with_name(f"{PARDONS}.taken")
        try:
            if names := await asyncio.to_thread(_take, self.pardons, taken):
                await self._pardon(None if EVERYBODY in names else names)
                taken.unlink()
        except OSError as error:
            logger.error("pardons unreadable", extra={"path": str(self.pardons), "detail": error.strerror})

    async def _revoke(self, node_ids: frozenset[str]) -> None:
        undone = await self.ledger.decide(partial(trust.revocation, request=node_ids))
        if undone != NOTHING_UNDONE:
            logger.info("revoked nodes settled", extra={"nodes": len(node_ids), **asdict(undone)})

    async def _pardon(self, node_ids: frozenset[str] | None) -> None:
        undone = await self.ledger.decide(partial(trust.pardon, request=node_ids))
        self.learners.wake(has_pardons=True)
        nodes = "all" if node_ids is None else sorted(node_ids)
        logger.info("samplers pardoned", extra={"nodes": nodes, "prompts": undone.prompts})


def _take(path: Path, taken: Path) -> frozenset[str]:
    """Move the file away and return the nodes in it; what was taken before and not settled comes first."""
    if not taken.exists():
        if not path.exists():
            return frozenset()
        path.rename(taken)
    words = taken.read_text(encoding="utf-8", errors="replace").split()
    return frozenset(filter(is_name, words)) or frozenset({""})
