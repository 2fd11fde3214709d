"""Computations of bench/sync.py; the links and processes themselves are tried by running it."""

import ctypes
import subprocess
from pathlib import Path

import numpy as np
import pytest

from bench.held_policy import HeldPolicy
from bench.sync_lab import network, report, versions
from bench.sync_lab.lab import Facts, steady_goodput
from bench.sync_lab.versions import Model, load_artifact, load_layout, publish_versions
from node.identity.signatures import SigningKey
from node.weights.format.manifest import verify_signed
from support.whole_version import WholeVersion

TINY = Model(layers=1, vocabulary=64)

_SHARED_LINE = """
#include "line.h"
int room(struct line *l, double now, double bytes, int wanted) { return line_room(l, now, bytes, wanted); }
double arrival(struct line *l, double now, double bytes) { return line_arrival(l, now, bytes); }
"""


class CLine(ctypes.Structure):
    """struct line of line.h."""

    _fields_ = tuple(
        (name, ctypes.c_double) for name in ("bytes_per_s", "delay_s", "queue_bytes", "free_at_s")
    )


@pytest.fixture(scope="module")
def line_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    directory = tmp_path_factory.mktemp("line")
    (directory / "line.c").write_text(_SHARED_LINE)
    include = f"-I{network.LINK_SOURCE.parent}"
    command = [str(network.compiler()), "-shared", "-fPIC", include, "-o", str(directory / "line.so")]
    subprocess.run([*command, str(directory / "line.c")], check=True)
    library = ctypes.CDLL(str(directory / "line.so"))
    library.room.argtypes = [ctypes.POINTER(CLine), ctypes.c_double, ctypes.c_double, ctypes.c_int]
    library.arrival.argtypes = [ctypes.POINTER(CLine), ctypes.c_double, ctypes.c_double]
    library.arrival.restype = ctypes.c_double
    return library


@pytest.mark.needs("gcc")
def test_a_packet_waits_for_those_before_it_then_for_the_wire_then_for_the_distance(
    line_library: ctypes.CDLL,
) -> None:
    line = CLine(1000.0, 0.5, 10_000.0, 0.0)
    assert line_library.arrival(line, 1.0, 100.0) == pytest.approx(1.0 + 0.1 + 0.5)
    assert line_library.arrival(line, 1.0, 100.0) == pytest.approx(1.0 + 0.2 + 0.5)
    assert line_library.arrival(line, 9.0, 100.0) == pytest.approx(9.0 + 0.1 + 0.5)


@pytest.mark.needs("gcc")
def test_a_queue_takes_what_fits_and_empties_at_the_rate_of_the_wire(line_library: ctypes.CDLL) -> None:
    line = CLine(1000.0, 0.5, 1000.0, 0.0)
    assert line_library.room(line, 1.0, 100.0, 64) == 10
    line_library.arrival(line, 1.0, 1000.0)
    assert line_library.room(line, 1.0, 100.0, 64) == 0
    assert line_library.room(line, 1.55, 100.0, 64) == 5
    assert line_library.room(line, 2.0, 100.0, 3) == 3


@pytest.mark.needs("gcc")
def test_a_line_without_a_rate_takes_everything_at_once(line_library: ctypes.CDLL) -> None:
    line = CLine(0.0, 0.5, 0.0, 0.0)
    assert line_library.room(line, 1.0, 1500.0, 64) == 64
    assert line_library.arrival(line, 1.0, 1e9) == pytest.approx(1.5)


@pytest.mark.needs("gcc")
def test_the_whole_emulator_compiles_without_a_warning(tmp_path: Path) -> None:
    command = [str(network.compiler()), "-O2", "-Wall", "-Wextra", "-Werror", "-pthread", "-o"]
    subprocess.run([*command, str(tmp_path / "link"), str(network.LINK_SOURCE)], check=True)


def test_what_is_published_leads_from_the_first_words_to_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, size in (("HIDDEN", 48), ("FEED_FORWARD", 128), ("KEY_VALUES", 16), ("_DRAWN", 1 << 14)):
        monkeypatch.setattr(versions, name, size)
    key = SigningKey.generate()
    training = publish_versions(
        tmp_path / "training", TINY, run_id="bench", key=key, steps=2, keyframes=1, density=0.01
    )
    assert training.density == pytest.approx(0.01, rel=0.2)
    layout = load_layout(training.directory)
    held = HeldPolicy.of(0, np.load(training.directory / "words0.npy"), layout=layout)
    for step in training.steps:
        signed, payloads = load_artifact(training.directory, step.name)
        manifest = verify_signed(signed, public_key=key.public_key, run_id="bench")
        stage = WholeVersion(manifest, layout=layout, base=held)
        stage.take_held()
        for frame in stage.missing():
            stage.put(frame, payloads[frame])
        held = stage.finish()
    np.testing.assert_array_equal(held.words, np.load(training.directory / "words.npy"))
    assert [keyframe.name for keyframe in training.keyframes] == ["1-key"]


def test_steady_goodput_leaves_out_the_start_and_the_end() -> None:
    progress = [(0.0, 0), (8.0, 40), (9.0, 50), (10.0, 90), (20.0, 100)]
    assert steady_goodput(progress) == pytest.approx((90 - 40) / (10.0 - 8.0))


def _measured(*, ratio: float, egress: tuple[float, float]) -> list[Facts]:
    relay = {"scenario": "fanout", "receivers": 32, "has_relay": True, "bytes": 1, "seconds": 1.0}
    return [
        {"scenario": "step", "what": "whole file over HTTP", "bytes": 1, "seconds": 20.0},
        {"scenario": "step", "what": "step", "seconds": 0.2, "times_faster_than_http": ratio},
        relay | {"what": "keyframe", "hub_egress_copies": egress[0]},
        relay | {"what": "step", "hub_egress_copies": egress[1]},
        relay | {"what": "keyframe", "has_relay": False, "hub_egress_copies": 32.0},
    ]


def test_a_bar_is_judged_by_its_worst_figure() -> None:
    judged = {
        bar.scenario: (figure, holds)
        for bar, figure, holds in report.verdicts(_measured(ratio=99.0, egress=(1.0, 1.2)))
    }
    assert judged == {"step": (99.0, False), "fanout": (1.2, False)}
    judged = {
        bar.scenario: (figure, holds)
        for bar, figure, holds in report.verdicts(_measured(ratio=100.0, egress=(1.1, 1.0)))
    }
    assert judged == {"step": (100.0, True), "fanout": (1.1, True)}


def test_the_report_has_every_measurement_and_says_what_was_missed(tmp_path: Path) -> None:
    measured = _measured(ratio=50.0, egress=(1.0, 1.0))
    assert report.read(tmp_path) == []
    report.write(tmp_path, measured)
    assert report.read(tmp_path) == measured
    assert "| 50 | MISSED |" in (tmp_path / "sync.md").read_text()
