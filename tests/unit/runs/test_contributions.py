"""A contributor's rounds, read from its log: 3 s of steps and 2 s of exchange, in turn or at once."""

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from deploy.runs.contributions import Contributions, Round

COMPUTE_S, EXCHANGE_S, ROUNDS = 3.0, 2.0, 5


def _line(at_s: float, event: str, **fields: Any) -> str:
    return json.dumps({"time": datetime.fromtimestamp(at_s, UTC).isoformat(), "event": event, **fields})


def _lines(round_s: float) -> Iterator[str]:
    """Yield a log in which a contribution is handed in every ``round_s``, after two steps."""
    yield "not JSON"
    for number in range(ROUNDS):
        handed_in_s = 1000.0 + COMPUTE_S + number * round_s
        for step in (1, 2):
            began_s = handed_in_s - COMPUTE_S
            yield _line(began_s + step * COMPUTE_S / 2, "batch trained on", step_s=COMPUTE_S / 2)
        yield _line(handed_in_s, "contribution handed in", number=number, steps=2, bytes=100)
        yield _line(handed_in_s + 0.5, "contribution merged", number=number, version=number + 1)
        yield _line(handed_in_s + EXCHANGE_S, "mirrored", version=number + 1)


@pytest.mark.parametrize("round_s", [COMPUTE_S + EXCHANGE_S, max(COMPUTE_S, EXCHANGE_S)])
def test_rounds_are_between_contributions_and_exchanges_end_with_the_words(
    tmp_path: Path, round_s: float
) -> None:
    log = tmp_path / "contributor-1.log"
    log.write_text("\n".join(sorted(_lines(round_s), key=lambda line: line[:45])))
    told = Contributions.of(log)
    assert told.rounds == (Round(round_s, COMPUTE_S, EXCHANGE_S),) * (ROUNDS - 1)
    assert (told.first_step_at_s, told.steps, told.payload_bytes) == (1000.0, 2 * ROUNDS, 100 * ROUNDS)
    assert told.times_fewer(1000) == 4 * 1000 * 2 * ROUNDS / (100 * ROUNDS)
    # What it all took, from the first step to the last words: T (C + X), or T max(C, X) + min(C, X).
    whole_s = COMPUTE_S + (ROUNDS - 1) * round_s + EXCHANGE_S
    assert whole_s == {5.0: 5.0 * ROUNDS, 3.0: 3.0 * ROUNDS + 2.0}[round_s]


def test_a_log_without_a_step_is_refused(tmp_path: Path) -> None:
    log = tmp_path / "contributor-1.log"
    log.write_text(_line(1.0, "mirrored", version=1))
    with pytest.raises(ValueError, match="no step"):
        Contributions.of(log)
