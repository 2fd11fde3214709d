"""``python -m bench.takeover --kills 50 --seed N``: two coordinators, and how long a takeover takes.

A run of two coordinators on a real PostgreSQL server (Debian's, on this machine's disk), a learner, a relay
and samplers over mutual TLS. The leader is killed (kill -9), every fourth time stopped for a while (SIGSTOP).
The other must serve within ten seconds, the run go on, no group be lost or doubled; a leader that was
replaced must end with its exit code. Prints its progress on standard error and a JSON summary; exits with 1
if a promise was broken.
"""

import sys
from functools import partial
from pathlib import Path

from bench.kill_lab import command
from bench.kill_lab.plan import Plan
from bench.kill_lab.takeovers import TakeoverCampaign, TakeoverStage
from deploy.runs.postgresql_server import postgresql_server


async def run(plan: Plan, root: Path) -> command.Summary:
    """Run the whole campaign below ``root``, which is made, and return its summary."""
    with postgresql_server(is_durable=True) as server:
        stage_of = partial(TakeoverStage, database=server.create("run"))
        return await command.run_campaign(plan, root, TakeoverCampaign, stage_of=stage_of)


def main() -> int:
    """Run, print, and return the exit code."""
    parser = command.parser("takeover", __doc__)
    parser.add_argument("--kills", type=int, default=50, help="how many; default: %(default)s")
    arguments = parser.parse_args()
    plan = Plan(arguments.kills, arguments.seed, ("sampler-1", "sampler-2"), frames=2)
    return command.main("takeover", arguments.dir, plan.seed, partial(run, plan))


if __name__ == "__main__":
    sys.exit(main())
