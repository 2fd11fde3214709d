"""``python -m bench.grants``: leases the coordinator grants per second, by the slots that are open.

    python -m bench.grants                                 64, 512, 4096 and 65 536 open slots
    python -m bench.grants >> bench/results/grants.jsonl   keeps the lines; the table goes to the terminal

what       decision: decided and applied, in memory. ledger: the same through ``RunLedger`` and a real
           SQLite file, one fsync a lease, asked for by 64 callers at once
per_s      grants of one lease each
us         by the clock, for one
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from node.clock import SystemClock
from node.coordinator.ledger.ledger_file import Ledger
from node.coordinator.metrics import CoordinatorMetrics
from node.coordinator.run_ledger import RunLedger
from node.coordinator.work.accounts import Accounts
from node.coordinator.work.balance import Balance, Transaction
from node.coordinator.work.capacity import Bounds
from node.coordinator.work.decisions.decision import Decide
from node.coordinator.work.decisions.leasing import LeaseRequest, Released, ReturnedLeases, lease, release
from node.coordinator.work.slots.slot import Attempt, Slot, SlotBalance, SlotState
from node.coordinator.work.terms.model_check import Learner
from node.coordinator.work.terms.run_terms import RunTerms, Work
from node.policy import PolicyVersion
from node.rollout import LeaseGrant
from node.sampling_parameters import SamplingParameters
from node.telemetry.own_faults import OwnFaults

OPEN_SLOTS: Final = (64, 512, 4096, 65_536)
SAMPLERS: Final = 1024
CALLERS: Final = 64
"""Samplers that ask at the same time, as they do of a coordinator of a thousand."""

_WORK: Final = Work("bench", "addition", 8, SamplingParameters(1.0, 1.0, 0, 128))
_WIDE: Final = Bounds(
    concurrency_groups=1 << 20,
    buffer_groups=1 << 20,
    batch_groups=1 << 20,
    max_staleness_versions=8,
    buffer_bytes=1 << 40,
)
_LEARNER: Final = Learner("learner", 1, b"l" * 16, b"t" * 16, vocabulary_size=100, version=0)


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement."""

    what: str
    open_slots: int
    per_s: float
    us: float


def main() -> None:
    """Measure each size, print a line each, and how much slower the largest is than the smallest."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--open", type=int, nargs="+", default=OPEN_SLOTS, metavar="SLOTS")
    parser.add_argument("--seconds", type=float, default=2.0, help="for each line")
    arguments = parser.parse_args()
    lines = [line for size in arguments.open for line in measured(size, seconds=arguments.seconds)]
    for what in ("decision", "ledger"):
        of_it = [line for line in lines if line.what == what]
        ratio = of_it[-1].us / of_it[0].us
        figures = ", ".join(f"{line.per_s:.0f}/s at {line.open_slots}" for line in of_it)
        print(f"{what}: {figures}; the last takes {ratio:.2f} of the first's time", file=sys.stderr)


def measured(open_slots: int, *, seconds: float) -> Iterator[Line]:
    """Measure with as many slots open as given, three in four leased and the others in the spool."""
    slots = tuple(_slot(number) for number in range(open_slots))
    for what, per_s in (
        ("decision", _decided(slots, seconds=seconds)),
        ("ledger", asyncio.run(_recorded(slots, seconds=seconds))),
    ):
        line = Line(what, open_slots, round(per_s, 1), round(1e6 / per_s, 1))
        print(json.dumps(asdict(line)), flush=True)
        yield line


def _slot(number: int) -> Slot:
    holder = f"s{number % SAMPLERS}"
    if number % 4:
        return Slot(number, number, SlotState.LEASED, (Attempt(1, holder),), granted=1)
    return Slot(number, number, SlotState.SPOOLED, (Attempt(1, holder, is_submitted=True),), 1, winner=1)


def _accounts(slots: tuple[Slot, ...]) -> Accounts:
    terms = RunTerms(
        _WORK,
        _WIDE,
        prompts=1 << 20,
        prompt_seed=0,
        lease_ttl_s=600.0,
        lease_max_s=3600.0,
        prompt_retry_s=600.0,
    )
    balance = Balance(SlotBalance(open_ones=slots, next_slot=len(slots)), facts=(_LEARNER,))
    accounts = Accounts(balance, terms, now=time.time())
    accounts.confirm()
    return accounts


def _lease(sampler_id: str) -> Decide[LeaseGrant]:
    return partial(lease, request=LeaseRequest(sampler_id, 1, PolicyVersion(0)))


def _release(sampler_id: str, grant: LeaseGrant) -> Decide[Released]:
    lease_ids = tuple(one.lease_id for one in grant.leases)
    return partial(release, request=ReturnedLeases(sampler_id, lease_ids))


def _decided(slots: tuple[Slot, ...], *, seconds: float) -> float:
    accounts, now, took_s, grants = _accounts(slots), time.time(), 0.0, 0
    ends_s = time.perf_counter() + seconds
    while time.perf_counter() < ends_s:
        sampler_id = f"s{grants % SAMPLERS}"
        started_s = time.perf_counter()
        leased = _lease(sampler_id)(accounts, now=now)
        accounts.apply(leased.transaction, now=now)
        took_s += time.perf_counter() - started_s
        grants += 1
        accounts.apply(_release(sampler_id, leased.answer)(accounts, now=now).transaction, now=now)
    return grants / took_s


async def _recorded(slots: tuple[Slot, ...], *, seconds: float) -> float:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as directory:  # not /tmp, which may be memory
        ledger = Ledger.open(Path(directory) / "ledger.sqlite", run_id=_WORK.run_id)
        ledger.record(Transaction(slots=slots, facts=(_LEARNER,)))
        accounts = _accounts(slots)
        clock, metrics = SystemClock(), CoordinatorMetrics(CollectorRegistry())
        faults = OwnFaults(clock.monotonic)
        run_ledger = RunLedger(ledger, accounts, metrics=metrics, faults=faults, clock=clock)
        ends_s = time.perf_counter() + seconds

        async def ask(sampler_id: str) -> int:
            grants = 0
            while time.perf_counter() < ends_s:
                grant = await run_ledger.decide(_lease(sampler_id))
                await run_ledger.decide(_release(sampler_id, grant))
                grants += 1
            return grants

        started_s = time.perf_counter()
        grants = sum(await asyncio.gather(*(ask(f"s{n}") for n in range(CALLERS))))
        took_s = time.perf_counter() - started_s
        await run_ledger.close()
    return 2 * grants / took_s  # a lease given back costs as much as one granted


if __name__ == "__main__":
    main()
