from node.rpc.calls.rpc_rules import RULES, service_of
from node.values.limits import MESSAGE_BYTES
from node.values.roles import Role
from support.rpc import METHODS

PREFIX = "/heterorl.v1."


def test_every_rpc_of_every_service_has_a_rule_and_every_rule_an_rpc() -> None:
    assert set(RULES) == set(METHODS)


def test_every_service_has_a_message_limit() -> None:
    assert set(MESSAGE_BYTES) == set(map(service_of, METHODS))


def test_only_enrolment_is_open_to_strangers() -> None:
    assert [path for path, rule in RULES.items() if rule.roles is None] == [f"{PREFIX}EnrolmentService/Enrol"]


def test_only_the_learner_publishes_and_drains_and_only_samplers_lease_and_submit() -> None:
    allowed = {path.removeprefix(PREFIX): set(rule.roles or ()) for path, rule in RULES.items()}
    for name in ("PolicyService/OfferArtifact", "PolicyService/UploadFrames", "RolloutService/DrainRollouts"):
        assert allowed[name] == {Role.LEARNER}
    for name in ("LeasePrompts", "ReleaseLeases"):
        assert allowed[f"RolloutService/{name}"] == {Role.SAMPLER}
    assert allowed["RolloutService/SubmitRollouts"] == {Role.SAMPLER}


def test_an_operator_may_look_and_do_nothing_else() -> None:
    allowed = [path for path, rule in RULES.items() if Role.OPERATOR in (rule.roles or ())]
    assert allowed == [f"{PREFIX}MembershipService/GetStatus"]


def test_only_streams_are_endless() -> None:
    for path, rule in RULES.items():
        if rule.is_endless:
            assert METHODS[path].server_streaming, path
