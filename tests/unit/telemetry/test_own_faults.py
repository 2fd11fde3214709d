from node.errors import Reason
from node.telemetry.metrics import NodeMetrics, create_registry
from node.telemetry.own_faults import FORGOTTEN_S, SETTLED_S, OwnFault, OwnFaults
from support.clock import ManualClock
from support.present import present


class At:
    def __init__(self) -> None:
        self.now_s = 0.0
        self.faults = OwnFaults(lambda: self.now_s)

    def ledger_fails(self) -> None:
        self.faults.failed("ledger", "the ledger could not be written: full", fix="Free space.")

    def after(self, seconds: float) -> "At":
        self.now_s += seconds
        return self


def test_what_works_has_no_fault() -> None:
    at = At()
    at.faults.works("ledger")
    assert at.faults.first() is None


def test_a_fault_lasts_from_its_first_failure_until_the_part_works_again() -> None:
    at = At()
    at.ledger_fails()
    at.after(7).ledger_fails()
    at.after(3)
    assert at.faults.first() == OwnFault("the ledger could not be written: full", "Free space.", 10.0)
    at.after(SETTLED_S).faults.works("ledger")
    assert at.faults.first() is None


def test_a_full_disk_that_takes_a_small_write_now_and_then_is_still_full() -> None:
    at = At()
    for _ in range(20):
        at.ledger_fails()
        at.after(SETTLED_S / 2).faults.works("ledger")
    assert present(at.faults.first()).for_s == 20 * SETTLED_S / 2


def test_where_nothing_is_written_any_more_a_part_that_tells_when_it_works_stays_faulty() -> None:
    at = At()
    at.faults.works("ledger")
    at.ledger_fails()
    assert at.after(10 * FORGOTTEN_S).faults.first() is not None


def test_a_part_that_never_tells_when_it_works_is_faulty_for_a_while() -> None:
    at = At()
    at.ledger_fails()
    assert at.after(FORGOTTEN_S - 1).faults.first() is not None
    assert at.after(1).faults.first() is None


def test_the_ledger_is_told_before_what_only_counts_refusals() -> None:
    at = At()
    at.faults.failed("RolloutService", "the disk takes no writes", fix="")
    at.faults.works("ledger")
    at.after(1).ledger_fails()
    assert present(at.faults.first()).what.startswith("the ledger")


def test_every_refusal_for_the_disk_is_a_fault_of_this_process_and_no_other_refusal_is() -> None:
    metrics = NodeMetrics(create_registry(), roles=["learner"], clock=ManualClock())
    metrics.count_refusal(service="Learner", reason=Reason.BUSY)
    assert metrics.faults.first() is None
    metrics.count_refusal(service="Learner", reason=Reason.DISK)
    found = present(metrics.faults.first())
    assert found.what == "the disk of its state directory takes no writes of Learner"
