import grpc
import pytest

from node.errors import STATUS_OF_REASON, ConfigError, Reason, RefusedError


@pytest.mark.parametrize("reason", list(Reason))
def test_every_refusal_has_a_grpc_status(reason: Reason) -> None:
    assert getattr(grpc.StatusCode, STATUS_OF_REASON[reason]) is not grpc.StatusCode.OK


def test_a_refusal_says_what_and_how_to_mend_it() -> None:
    assert str(RefusedError(Reason.FENCED, "too old", fix="fetch again")) == "too old; fetch again"


def test_a_configuration_error_names_key_value_source_rule_and_fix() -> None:
    error = ConfigError(
        key="learner.learning_rate", value=-1, source="a.toml", rule="must be above 0", fix="Try 1e-6."
    )
    assert str(error) == "learner.learning_rate = -1 (from a.toml): must be above 0. Try 1e-6."
