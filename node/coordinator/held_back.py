"""The nodes that operators hold back from leases, while what they hold already is finished.

`heterorl-node pause` and `drain` edit a file of the coordinator's state directory, as `revoke` does. It
survives restarts, may be changed while the coordinator is down, and counts from the next request for leases.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from node.clock import moment, moment_at_start
from node.identity.revocation import NodeFile
from node.rollout import LeaseGrant
from node.run import PeerStatus
from node.wording import counted

FILE_NAME: Final = "held_back"

EVERYBODY: Final = "all"
"""In the file: the run is paused."""

PAUSED: Final = "paused"
DRAINED: Final = "drained"
"""Waits of samplers that are held back, as grants name them; also the state that the status shows."""

RETRY_S: Final = 1.0
"""How soon a sampler asks again: the end of a pause takes no longer to be noticed."""


@dataclass(frozen=True, slots=True)
class HoldOrder:
    """An operator's order, as the file has it."""

    since_s: float | None
    """Unix seconds; None: nobody wrote it down."""
    because: str

    @classmethod
    def read(cls, remark: str) -> "HoldOrder":
        """Read the remark beside a name."""
        return cls(*moment_at_start(remark))

    def for_s(self, now: float) -> float:
        """Return how long it has stood; 0 where that is not known."""
        return 0.0 if self.since_s is None else max(0.0, now - self.since_s)

    def __str__(self) -> str:
        return f"by an operator: {self.because}" if self.because else "by an operator"


class HeldBack:
    """The run's held-back nodes, as files name them now."""

    def __init__(self, *paths: Path) -> None:
        self._files = [NodeFile(path) for path in paths]

    @property
    def pause(self) -> HoldOrder | None:
        """The order that pauses the run; None: it is not paused."""
        remark = self._remarks().get(EVERYBODY)
        return None if remark is None else HoldOrder.read(remark)

    @property
    def drained(self) -> frozenset[str]:
        """Node ids of drained samplers."""
        return frozenset(self._remarks()) - {EVERYBODY}

    def refusal(self, sampler_id: str) -> LeaseGrant | None:
        """Return the empty grant of a sampler that is held back; None: it is not."""
        remarks = self._remarks()
        why = PAUSED if EVERYBODY in remarks else DRAINED if sampler_id in remarks else ""
        return LeaseGrant((), RETRY_S, why) if why else None

    def shown(self, row: PeerStatus) -> PeerStatus:
        """Return a row of the status, of a drained sampler that is here with that state and why."""
        remark = self._remarks().get(row.node_id)
        if remark is None or row.state not in ("joined", "live"):
            return row
        order = HoldOrder.read(remark)
        since = "" if order.since_s is None else f" since {moment(order.since_s)}"
        detail = f"drained{since} {order}; it holds {counted(row.leases, 'lease')}"
        return replace(row, state=DRAINED, standing_detail=detail)

    def _remarks(self) -> Mapping[str, str]:
        return {name: remark for file in self._files for name, remark in file.remarks().items()}
