"""The publishing figures are of the whole version, and the publisher beside training keeps up."""

import json
from unittest import mock

import pytest
import torch

from bench import publish


def test_every_figure_is_printed_for_a_small_model(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        with mock.patch.object(publish, "_STEPS_S", (0.0,)):
            publish.main(["--parameters", "1e5", "--repetitions", "1"])
    finally:
        torch.set_num_threads(threads)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    *passes, training = lines
    assert {line["what"] for line in passes} == {"fused", "cast_then_encode", "cast", "encode"}
    assert all(line["parameters"] == 98304 and line["gb_s"] > 0 for line in passes)
    assert all(0 < line["density"] < 0.1 for line in passes)
    assert training["what"] == "training_thread"
    assert 1 <= training["published"] <= training["versions"]
    assert training["waits_s_max"] >= training["waits_s_mean"] >= 0
