from node.coordinator.work.grader_agreement import AgreedGrader, agreed_grader

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def agreed(claims: dict[str, bytes], *, before: bytes = b"", configured: bytes = b"") -> bytes:
    return agreed_grader(AgreedGrader(before), claims, configured=configured).digest


def test_what_most_samplers_say_is_the_runs_grader() -> None:
    assert agreed({}) == b""
    assert agreed({"1": A}) == A
    assert agreed({"1": A, "2": B, "3": B}, before=A) == B


def test_one_sampler_does_not_overrule_what_was_agreed_before_it_came() -> None:
    assert agreed({"1": A, "2": B}, before=A) == A
    assert agreed({"1": A, "2": B}, before=B) == B
    assert agreed({}, before=A) == A


def test_what_is_configured_is_not_put_to_a_vote() -> None:
    assert agreed({"1": A, "2": A}, configured=C) == C


def test_another_grader_is_refused_with_both_digests_and_who_said_the_runs() -> None:
    agreed_on = agreed_grader(AgreedGrader(), {"1": A, "2": A, "3": B}, configured=b"")
    assert agreed_on.objection(A) == ""
    assert agreed_on.objection(B) == (
        f"grader code {B.hex()} is not the run's {A.hex()}, as 2 of 3 samplers said"
    )
    assert AgreedGrader().objection(B) == ""
