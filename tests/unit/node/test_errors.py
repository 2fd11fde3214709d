from node.errors import ConfigError, Reason, Recovery, RefusedError


def test_a_refusal_says_what_and_how_to_mend_it() -> None:
    assert str(RefusedError(Reason.WRONG_BASE, "too old", fix="fetch again")) == "too old; fetch again"


def test_a_configuration_error_names_key_value_source_rule_and_fix() -> None:
    error = ConfigError(
        key="learner.learning_rate", value=-1, source="a.toml", rule="must be above 0", fix="Try 1e-6."
    )
    assert str(error) == "learner.learning_rate = -1 (from a.toml): must be above 0. Try 1e-6."


def test_only_waiting_and_planning_again_are_retried() -> None:
    retried = {reason for reason in Reason if reason.is_retryable}
    assert retried == {reason for reason in Reason if reason.recovery in (Recovery.WAIT, Recovery.REPLAN)}


def test_a_peer_stops_only_where_its_identity_or_configuration_is_wrong() -> None:
    assert {reason for reason in Reason if reason.recovery is Recovery.STOP} == {
        Reason.UNAUTHENTICATED,
        Reason.REVOKED,
        Reason.WRONG_ROLE,
        Reason.FOREIGN_RUN,
        Reason.PROTOCOL_MISMATCH,
        Reason.LAYOUT_MISMATCH,
        Reason.TOKENIZER_MISMATCH,
        Reason.BASE_MISMATCH,
        Reason.TASK_MISMATCH,
        Reason.FENCED,
        Reason.ROLLBACK,
        Reason.LEDGER_BEHIND,
        Reason.BAD_SIGNATURE,
    }
