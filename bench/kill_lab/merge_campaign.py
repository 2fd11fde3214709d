"""Kills a learner that merges and its contributors, and cuts half of the fleet off meanwhile.

kill -9    dealt --> trained on --> payload under way --> record durable --> announced --> adopted
cut off    every second contributor and sampler, and the relay: connections refused, or nothing comes through
"""

import asyncio
import signal
from typing import Any, ClassVar, Final

from bench.kill_lab.campaign import KillCampaign
from bench.kill_lab.instants import INSTANTS, MERGING_LEARNER
from bench.kill_lab.merge_witness import MergeWitness
from bench.kill_lab.plan import HUB_LINK, MERGE_LINK
from bench.kill_lab.stage import Stage
from bench.shared.demo_run import say
from deploy.runs.run_directory import LEARNER

TOGETHER_SHARE: Final = 0.5
"""Share of kills before which all contributors are back, so that several are merged; others come sooner."""

CUT_SHARE: Final = 0.3
"""Share of kills that come while half of the fleet is cut off, or is about to be."""

LONGEST_CUT_S: Final = 12.0
"""The learner deals the groups of who is gone to others long before."""

LONG_SHARE: Final = 0.15
"""Share of silent cuts that last until the ends find out by pings."""

LONG_CUT_S: Final = 40.0


class MergeCampaign(KillCampaign):
    """One run whose learner merges, its kills and its partitions."""

    _instants: ClassVar = {**INSTANTS, LEARNER: (*INSTANTS[LEARNER], *MERGING_LEARNER)}
    _witness_of = MergeWitness.of
    _witness: MergeWitness

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self._partition: asyncio.Task[None] | None = None
        self.cuts_s: list[float] = []

    def summary(self) -> dict[str, Any]:
        """Return what there is to say."""
        cuts = {"partitions": len(self.cuts_s), "cut_off_s": round(sum(self.cuts_s), 1)}
        return {"method": self._stage.plan.method} | super().summary() | cuts | self._witness.merges()

    async def _kill_one(self) -> None:
        is_cut, is_silent = self._draw.random() < CUT_SHARE, self._draw.random() < 0.5
        is_together = self._draw.random() < TOGETHER_SHARE
        cut_s, is_long = self._draw.uniform(1.0, LONGEST_CUT_S), self._draw.random() < LONG_SHARE
        if is_cut and (self._partition is None or self._partition.done()):
            lasts_s = LONG_CUT_S if is_silent and is_long else cut_s
            self._partition = asyncio.create_task(self._cut_off(lasts_s, is_silent=is_silent))
        for name in self._stage.plan.contributors if is_together else ():
            await self._stage.wait_until_ready(name)
        await super()._kill_one()
        if self._partition is not None and len(self.kills) == self._stage.plan.kills:
            await self._partition

    def _disturb(self) -> bool:
        """Leave the moments as they are: merges have none, or few, and every replay of them is exact."""
        return False

    async def _cut_off(self, lasts_s: float, *, is_silent: bool) -> None:
        """Cut half of the fleet off: nothing comes through, or connections are lost and refused."""
        stage, lines = self._stage, (HUB_LINK, MERGE_LINK)
        say(f"half of the fleet is cut off for {lasts_s:.0f} s{', silently' if is_silent else ''}")
        for line in lines:
            if is_silent:
                stage.signal(line, signal.SIGSTOP)
            else:
                await stage.kill(line)
        await asyncio.sleep(lasts_s)
        for line in lines:
            if is_silent:
                stage.signal(line, signal.SIGCONT)
            else:
                await stage.start_link(line)
        self.cuts_s.append(lasts_s)
