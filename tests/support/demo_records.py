"""Steps and ledgers of a run that kept every promise, to be broken one thing at a time."""

from collections.abc import Sequence

from deploy.demo.plan import FAR, NEAR
from deploy.runs.records import LedgerRecord, Step, Trained


def make_step(version: int, *, reward: float = 0.9, groups: Sequence[Trained] | None = None) -> Step:
    """Return a step on two groups of its own: a fresh one and one that is six versions stale."""
    own = (Trained(f"{2 * version}.1", NEAR, 1), Trained(f"{2 * version + 1}.1", FAR, 6))
    return Step(
        version=version,
        at_s=1000.0 + version,
        reward_mean=reward,
        kl_nats=0.01,
        ess_ratio=0.9,
        staleness_mean_versions=3.5,
        step_s=0.1,
        groups=own if groups is None else tuple(groups),
    )


def make_steps(versions: int = 30) -> list[Step]:
    """Return steps whose reward rises from 0.4 to 0.9."""
    return [make_step(v, reward=0.4 if v <= 10 else 0.9) for v in range(1, versions + 1)]


def ledger_of(steps: Sequence[Step], *, waiting: int = 3, stale: int = 2) -> LedgerRecord:
    """Return the ledger that tells the same story as the steps."""
    trained = sum(len(step.groups) for step in steps)
    spooled = trained + waiting + stale
    return LedgerRecord(
        steps={step.version: tuple(group.group_id for group in step.groups) for step in steps},
        slots={"trained": trained, "accepted": waiting, "available": stale, "leased": 1},
        verdicts={
            NEAR: {"spooled": spooled - stale, "accepted": trained, "trained": trained},
            FAR: {"spooled": stale, "stale": stale},
        },
        roots={step.version: f"{step.version:02x}" for step in steps},
    )
