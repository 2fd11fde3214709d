import pytest
from pydantic import ValidationError

from node.coordinator.config import CoordinatorConfig
from node.rollout import SamplingParameters


def config(**values: object) -> CoordinatorConfig:
    return CoordinatorConfig.model_validate({"task": "addition", "prompts": 100, **values})


def test_the_defaults_are_a_coherent_small_run() -> None:
    assert config().sampling == SamplingParameters(1.0, 1.0, 0, 32)
    assert config().bounds.batch_groups == 8


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompts", 0),
        ("group_size", 1),
        ("group_size", 1025),
        ("temperature", 0.0),
        ("top_p", 1.5),
        ("min_p", 1.5),
        ("stop", ["x"] * 17),
        ("max_staleness_versions", -1),
        ("listen", "nowhere"),
        ("lease_ttl_s", 0),
        ("unknown", 1),
    ],
)
def test_a_value_out_of_its_bounds_is_refused_by_name(key: str, value: object) -> None:
    with pytest.raises(ValidationError) as error:
        config(**{key: value})
    assert error.value.errors()[0]["loc"] == (key,)


def test_a_stop_string_has_1_to_64_characters() -> None:
    assert config(stop=["日" * 64]).sampling.stop == ("日" * 64,)
    for wrong in ("", "x" * 65):
        with pytest.raises(ValidationError) as error:
            config(stop=[wrong])
        assert error.value.errors()[0]["loc"] == ("stop", 0)


def test_a_buffer_that_can_never_fill_a_batch_is_refused() -> None:
    with pytest.raises(ValidationError, match="no batch would ever fill"):
        config(buffer_groups=7, batch_groups=8)


def test_a_lease_that_one_late_heartbeat_would_end_is_refused() -> None:
    with pytest.raises(ValidationError, match="two heartbeats"):
        config(lease_ttl_s=3, heartbeat_interval_s=2)


def test_every_setting_says_what_moving_it_does() -> None:
    assert all(field.description or name == "task" for name, field in CoordinatorConfig.model_fields.items())
