"""``python -m bench.restores --moments 50 --seed N``: older ledgers under a real run, restarts in any order.

Copies of the ledger are taken at random moments of a run of coordinator, learner, relay and sampler. Then,
again and again: the coordinator is stopped or killed, an older ledger is put back by hand, by a lost -wal,
or by the command, and the processes are restarted in a random order. Within two minutes the run must go on,
or say in its status what the ledger lacks and go on once that is mended. No slot may be trained on twice.
Prints its progress on standard error and a JSON summary; exits with 1 if a promise was broken.
"""

import sys
from functools import partial
from pathlib import Path

from bench.kill_lab import command
from bench.kill_lab.plan import Plan
from bench.kill_lab.restores import RestoreCampaign
from bench.kill_lab.stage import Stage


async def run(plan: Plan, root: Path, *, moments: int) -> command.Summary:
    """Run the whole campaign below ``root``, which is made, and return its summary."""
    campaign = partial(RestoreCampaign, moments=moments)
    return await command.run_campaign(plan, root, campaign, stage_of=Stage)


def main() -> int:
    """Run, print, and return the exit code."""
    parser = command.parser("restores", __doc__)
    parser.add_argument("--moments", type=int, default=50, help="how many restores; default: %(default)s")
    arguments = parser.parse_args()
    plan = Plan(kills=0, seed=arguments.seed, samplers=("sampler-1",))
    work = partial(run, plan, moments=arguments.moments)
    return command.main("restores", arguments.dir, plan.seed, work)


if __name__ == "__main__":
    sys.exit(main())
