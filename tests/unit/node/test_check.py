"""How a command goes through a list of checks."""

from collections.abc import Iterator

import pytest

from node.checks.check import DRY_RUN, EVERYTHING, START, Check, Finding, Grade, Needs, examine, require
from node.commands.doctor.findings import faults_of, show
from node.errors import ConfigError, NotReadyError, StartupError

FAULT = StartupError("it is not there", fix="Put it there.")


def fine(name: str, needs: Needs = Needs.DISK, *after: Check) -> Check:
    return Check(name, needs, lambda: [Finding(name, Grade.OK, "it is there")], after)


def broken(name: str, *after: Check, fault: StartupError | ConfigError = FAULT) -> Check:
    def run() -> Iterator[Finding]:
        yield Finding(name, Grade.WARN, "it looks odd")
        raise fault

    return Check(name, Needs.DISK, run, after)


def grades(*checks: Check, needs: Needs = EVERYTHING) -> list[tuple[str, str]]:
    return [(one.layer, one.grade.value) for one in examine(checks, needs=needs)]


@pytest.mark.parametrize("needs", [START, DRY_RUN, EVERYTHING, Needs.NETWORK])
def test_a_command_makes_the_checks_whose_needs_it_meets(needs: Needs) -> None:
    checks = [fine(str(one.name), one) for one in Needs]
    assert [layer for layer, _ in grades(*checks, needs=needs)] == [one.name for one in needs]


def test_a_start_needs_no_more_than_a_dry_run_which_asks_nobody() -> None:
    assert START in DRY_RUN
    assert not DRY_RUN & (Needs.NETWORK | Needs.MACHINE)
    assert DRY_RUN in EVERYTHING


def test_an_error_is_a_finding_beside_those_before_it() -> None:
    assert grades(broken("a"), fine("b")) == [("a", "warn"), ("a", "fail"), ("b", "ok")]


def test_what_follows_on_a_check_that_failed_is_left_out_and_what_follows_on_that_too() -> None:
    bad, good = broken("bad"), fine("good")
    second = fine("second", Needs.DISK, bad, good)
    third = fine("third", Needs.DISK, second)
    assert grades(good, bad, second, third, fine("apart"))[-1] == ("apart", "ok")
    assert not {"second", "third"} & {layer for layer, _ in grades(good, bad, second, third)}


def test_a_fault_of_two_roles_is_found_once() -> None:
    assert grades(broken("a"), broken("a")).count(("a", "fail")) == 1


def test_a_start_ends_with_every_fault_and_its_type() -> None:
    wrong = ConfigError(key="k", value=1, source="the configuration", rule="is too low", fix="Raise it.")
    with pytest.raises(NotReadyError) as raised:
        require([broken("a"), fine("b"), broken("c", fault=wrong)], needs=DRY_RUN)
    assert raised.value.faults == (FAULT, wrong)
    require([fine("a")], needs=DRY_RUN)


def test_findings_are_shown_alike_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    checks = [fine("a"), broken("b")]
    failed = show(examine(checks, needs=EVERYTHING))
    assert faults_of(failed) == [FAULT]
    *_, said, fix = capsys.readouterr().out.splitlines()
    assert (said.split(), fix.strip()) == (["fail", "b", *FAULT.what.split()], f"-> {FAULT.fix}")
    show(examine(checks, needs=EVERYTHING), as_json=True)
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == '{"layer": "b", "grade": "fail", "what": "it is not there", "fix": "Put it there."}'
