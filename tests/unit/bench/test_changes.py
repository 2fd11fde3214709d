"""How much less a contribution sends than data parallel at float32, step by step."""

import pytest

from bench.changes import payload_bytes


@pytest.mark.parametrize("model", ["tiny", "drawn"])
def test_a_contribution_is_so_much_smaller_than_its_steps_at_float32(model: str) -> None:
    """At a rate of 1e-6, where what was left over has been handed in once."""
    steps = 16
    parameters, sizes = payload_bytes(model, rate=1e-6, steps=steps, rounds=2)
    fewer = {name: 4 * parameters * steps / size for name, size in sizes.items()}
    assert fewer["full"] > steps
    assert fewer["four_bit"] > 100
    assert fewer["low_rank"] > 100
    assert fewer["largest"] > 1000
    assert fewer["word_changes"] > 1000
