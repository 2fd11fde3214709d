"""Keeps interrupted transfers, with what had arrived of each, to be continued."""

from collections.abc import Collection
from typing import Final

from node.policy import ArtifactKey
from node.telemetry.transfer_metrics import TransferMetrics
from node.weights.format.manifest import Manifest
from node.weights.transfer.ranges import PutFrame, Transfer

_MOST: Final = 2
"""A relay interrupts a keyframe for every new step. Each transfer holds its ranges and partial frames."""


class PausedTransfers:
    """At most _MOST transfers; the oldest goes first."""

    def __init__(self, metrics: TransferMetrics) -> None:
        self._metrics = metrics
        self._transfers: dict[ArtifactKey, Transfer] = {}

    def keep(self, transfer: Transfer) -> None:
        """Keep a paused transfer, instead of an earlier one of the same artifact."""
        self._drop(transfer.key)
        self._transfers[transfer.key] = transfer
        self._metrics.add_paused_bytes(transfer.held_bytes)
        while len(self._transfers) > _MOST:
            self._drop(next(iter(self._transfers)))

    def take(self, manifest: Manifest, frames: Collection[int], put: PutFrame) -> Transfer | None:
        """Return the transfer of exactly these frames, now with ``put``; None: there is none.

        A transfer of other frames of the artifact is forgotten.
        """
        transfer = self._drop(manifest.key)
        if transfer is None or transfer.manifest != manifest or transfer.frames != set(frames):
            return None
        transfer.put = put
        return transfer

    def _drop(self, key: ArtifactKey) -> Transfer | None:
        transfer = self._transfers.pop(key, None)
        if transfer is not None:
            self._metrics.add_paused_bytes(-transfer.held_bytes)
        return transfer
