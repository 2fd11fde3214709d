"""``python -m bench.kills --kills 100 --seed N``: kill -9 at random, at the worst moments, of a real run.

    run: coordinator, learner, relay, samplers over mutual TLS and slow links
    kill --> look at the disk --> start again --> the run must go on --> next kill ... --> drain --> judge

Sampler, relay and learner are killed while versions are published, fetched, staged and applied: at what they
write, at any time, and while they start. An independent witness reads signatures, checkpoints, copies and
logs, and says whether anyone served weights that were not signed, went back, or lost or doubled work. Prints
its progress on standard error and a JSON summary; exits with 1 if a promise was broken.

With ``--task ranking`` the model ranks; ``--roles`` names who is
killed, the coordinator too if asked. With ``--ranks 2`` the learner has two ranks, and they alone are killed:
the first or another, at an entry of the journal, while a checkpoint or a version is written, while steps are
taken again. With ``--contributors 2`` the learner merges what they train, and it and they are killed: before
and after a merge record is durable, while payloads travel, versions are adopted; half of the fleet is cut off
now and then. The witness reads every record: no group in two, none dealt again once it is in one.
"""

import sys
from functools import partial
from pathlib import Path

from bench.kill_lab import command
from bench.kill_lab.campaign import KillCampaign
from bench.kill_lab.instants import INSTANTS
from bench.kill_lab.merge_campaign import MergeCampaign
from bench.kill_lab.plan import (
    FRAMES,
    FRAMES_OF_CONTRIBUTORS,
    FRAMES_OF_RANKS,
    KILLED,
    MERGING,
    METHODS,
    TASKS,
    Plan,
)
from bench.kill_lab.rank_campaign import RankCampaign
from bench.kill_lab.rank_stage import RankStage
from bench.kill_lab.stage import Stage
from node.kinds.registry import CAUSAL_LM


async def run(plan: Plan, root: Path) -> command.Summary:
    """Run the whole campaign below ``root``, which is made, and return its summary."""
    if plan.ranks > 1:
        return await command.run_campaign(plan, root, RankCampaign, stage_of=RankStage)
    campaign = MergeCampaign if plan.contributors else KillCampaign
    return await command.run_campaign(plan, root, campaign, stage_of=Stage)


def main() -> int:
    """Run, print, and return the exit code."""
    parser = command.parser("kills", __doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many; default: %(default)s")
    parser.add_argument("--samplers", type=int, default=2, help="how many take part; default: %(default)s")
    parser.add_argument("--ranks", type=int, default=1, help="of the learner; above 1 they alone are killed")
    parser.add_argument(
        "--task", choices=TASKS, default=CAUSAL_LM.name, help="kind of policy that is trained"
    )
    parser.add_argument("--contributors", type=int, default=0, help="whose steps the learner merges")
    parser.add_argument("--method", choices=METHODS, help="how it merges; default: one by the seed")
    whose = "whose processes are killed; default: sampler relay learner, or, merging, learner contributor"
    parser.add_argument("--roles", nargs="+", choices=sorted(INSTANTS), help=whose)
    given = parser.parse_args()
    samplers, contributors = _names("sampler", given.samplers), _names("contributor", given.contributors)
    frames = FRAMES_OF_RANKS if given.ranks > 1 else FRAMES_OF_CONTRIBUTORS if contributors else FRAMES
    plan = Plan(
        given.kills,
        given.seed,
        samplers,
        given.ranks,
        frames,
        policy=given.task,
        roles=tuple(given.roles or (MERGING if contributors else KILLED)),
        contributors=contributors,
        method=given.method or list(METHODS)[given.seed % len(METHODS)],
    )
    return command.main("kills", given.dir, plan.seed, partial(run, plan))


def _names(role: str, count: int) -> tuple[str, ...]:
    return tuple(f"{role}-{number + 1}" for number in range(count))


if __name__ == "__main__":
    sys.exit(main())
