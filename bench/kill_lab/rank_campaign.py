"""Kills ranks of a learner, the first and the others, and sees what journal and checkpoints make of it.

journal entry, told, shards being written, publication --kill--> start again --> replay --> first entry
                                                                      '---------kill----------'
"""

import asyncio
import statistics
import time
from collections import Counter
from typing import Any, Final

from bench.kill_lab.campaign import DISTURBED_SHARE, GOES_ON_S, Kill, KillCampaign
from bench.kill_lab.instants import ANY_TIME, INSTANTS, STARTING, Instant
from bench.kill_lab.plan import CHECKPOINT_EVERY_VERSIONS
from bench.kill_lab.rank_stage import RankStage
from bench.shared.demo_run import say
from deploy.runs.observation import is_ready
from deploy.runs.run_directory import LEARNER

RESUME_S: Final = 30.0
"""Longest time from a start to a new step, ranks having imported torch."""

AGAIN_SHARE: Final = 0.25
"""Share of kills that meet a learner that starts: it meets, loads, takes steps again."""

_BEGUN: Final = Instant("journal entry being written", "journal.sqlite-journal", is_change=True)
_CHECKPOINT: Final = (
    *(one for one in INSTANTS[LEARNER] if "checkpoint" in one.name),
    Instant("shard being written", "checkpoints/staged-*/*/*"),
)
_OTHERS: Final = (*(one for one in INSTANTS[LEARNER] if one not in (*_CHECKPOINT, _BEGUN)), ANY_TIME)
_MOVES_S: Final = 0.05


class RankCampaign(KillCampaign):
    """One run of several ranks and its kills."""

    _stage: RankStage

    def __init__(self, stage: RankStage) -> None:
        super().__init__(stage)
        self._launched_s = time.monotonic()
        self._start_s = 2.0
        """From the newest start to serving."""
        self._has_gone_on = True
        self.resume_s: list[float] = []
        """From each start to a new step, where no kill came between."""

    def summary(self) -> dict[str, Any]:
        """Return what there is to say."""
        replays = self._witness.replays
        compared = replays.exact + replays.inexact
        longest = max(self.resume_s, default=0.0)
        if longest > RESUME_S:
            self.broken.append(f"it took {longest:.1f} s from a start to a step, promised are {RESUME_S:.0f}")
        return super().summary() | {
            "ranks": self._stage.plan.ranks,
            "killed": dict(sorted(Counter(kill.name for kill in self.kills).items())),
            "exact_share": round(replays.exact / compared, 3) if compared else None,
            "resume_s": {
                "median": round(statistics.median(self.resume_s), 2) if self.resume_s else None,
                "longest": round(longest, 2),
            },
            "other_ranks_noticed": self._stage.ended_by_themselves,
        }

    async def _kill_one(self) -> None:
        rank = self._draw.randrange(self._stage.plan.ranks)
        if self.kills and self._draw.random() < AGAIN_SHARE:
            instant = self._draw.choice((STARTING, STARTING, _BEGUN))
            if instant is STARTING:
                await asyncio.sleep(self._draw.uniform(0.0, self._start_s))
                has_come = not await is_ready(self._stage.ports.telemetry[LEARNER])
            else:
                has_come = await self._wait_for(instant, LEARNER)
        else:
            await self._goes_on()
            instant = self._choose()
            has_come = await self._wait_for(instant, LEARNER)
            await asyncio.sleep(self._draw.uniform(0.0, instant.after_s))
        await self._stage.kill_rank(rank)
        version = self.version
        self.kills.append(Kill(f"{LEARNER}, rank {rank}", instant.name, has_come, version))
        await asyncio.to_thread(self._witness.examine, LEARNER)
        is_disturbed = self._draw.random() < DISTURBED_SHARE
        if is_disturbed:
            is_disturbed = await asyncio.to_thread(self._disturb)
        self._launched_s, self._has_gone_on = time.monotonic(), False
        await self._stage.launch(LEARNER, environ={})
        note = ("" if has_come else " (which did not come)") + (", moments disturbed" if is_disturbed else "")
        kills = self._stage.plan.kills
        say(f"{len(self.kills)}/{kills} rank {rank}: {instant.name}{note}, step {version}")

    def _choose(self) -> Instant:
        checkpoints = sorted((self._stage.state(LEARNER) / "checkpoints").glob("0*"))
        newest = int(checkpoints[-1].name) if checkpoints else 0
        is_due = self.version >= newest + CHECKPOINT_EVERY_VERSIONS - 2
        return self._draw.choice(_CHECKPOINT if is_due else _OTHERS)

    async def _goes_on(self) -> None:
        """Wait until the learner, started again, has made a new step."""
        since = self.kills[-1].version if self.kills else 0
        await self._stage.wait_until_ready(LEARNER)
        if not self._has_gone_on:
            self._start_s = time.monotonic() - self._launched_s
        deadline_s = time.monotonic() + GOES_ON_S
        while self.version <= since:
            self._stage.check()
            if time.monotonic() > deadline_s:
                self.broken.append(f"no step for {GOES_ON_S:.0f} s after version {since}")
                return
            await asyncio.sleep(_MOVES_S)
        if not self._has_gone_on:
            self.resume_s.append(time.monotonic() - self._launched_s)
            self._has_gone_on = True
