"""How fast a policy version reaches a sampler over a long line: ours, and what others send.

    python -m bench.sync                       every scenario, about a quarter of an hour
    python -m bench.sync --quick               less of each, about four minutes
    python -m bench.sync step keyframe         some of them; the results of the others are kept

    step        a 1 % step of 135 M parameters at 100 Mbit/s and 150 ms, against the whole file over HTTP
    keyframe    a keyframe on the same line, against bytes / bandwidth
    loss        goodput at 0.5 % loss over one connection and over many
    cut         a keyframe whose line is cut at 90 %, gone on with through another relay
    fanout      1 to 32 receivers, with and without a relay: what leaves the hub
    gigabit     512 MB at 1 Gbit/s and 150 ms, against plain TCP on the same line; control calls meanwhile
    chain       a keyframe through three relays after each other, against one hop

Real processes with mutual TLS in network namespaces, over links emulated in user space (sync_lab/link.c):
root, /dev/net/tun, iproute2, a C compiler, nginx, curl and iperf3 are needed. One JSON line per
measurement; the table goes to bench/results. Time runs from the moment the hub announces a version, which
it then has on disk, to the moment the receiver has verified every word of it; `served_s` includes its disk.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from bench.shared.played_run import PlayedRun
from bench.sync_lab import report
from bench.sync_lab.faults import cut, loss
from bench.sync_lab.fleets import chain, fanout
from bench.sync_lab.gigabit import gigabit
from bench.sync_lab.lab import Facts, Lab
from bench.sync_lab.steps import keyframe, step
from deploy import needs

SCENARIOS: Final[dict[str, Callable[[Lab], Iterator[Facts]]]] = {
    scenario.__name__: scenario for scenario in (step, keyframe, loss, cut, fanout, gigabit, chain)
}
NEEDED: Final = ("root", "gcc", "/dev/net/tun", "network namespaces", "nginx", "curl", "wget", "iperf3")
RESULTS: Final = Path(__file__).with_name("results")


def main() -> int:
    """Run scenarios; 2 if this machine cannot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="python -m bench.sync"
    )
    parser.add_argument("scenarios", nargs="*", choices=[[], *SCENARIOS], metavar="SCENARIO")
    parser.add_argument("--quick", action="store_true", help="less of each scenario")
    parser.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="default: bench/results")
    arguments = parser.parse_args()
    if lacking := needs.missing(NEEDED):
        print(*map(needs.sentence, lacking), sep="\n", file=sys.stderr)
        return 2
    wanted = arguments.scenarios or list(SCENARIOS)
    measured = [facts for facts in report.read(arguments.out) if facts["scenario"] not in wanted]
    with tempfile.TemporaryDirectory(prefix="heterorl-sync-") as directory:
        lab = Lab(Path(directory), arguments.quick, PlayedRun.make(Path(directory) / "run"))
        for name in wanted:
            for facts in SCENARIOS[name](lab):
                measured.append({"scenario": name} | facts)
                print(json.dumps(measured[-1]), flush=True)
    report.write(arguments.out, sorted(measured, key=lambda facts: list(SCENARIOS).index(facts["scenario"])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
