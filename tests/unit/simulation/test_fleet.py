"""A simulated run goes as its arithmetic says, and as production's decisions say where arithmetic ends."""

import json
import statistics
from pathlib import Path

import pytest

from node.commands.cli import main
from node.errors import StartupError
from node.simulation.fleet import Fleet
from node.simulation.profile import Learner, Link, Profile, Prompts, Run, Samplers
from node.simulation.report import Report

INSTANT = Link(round_trip_s=0.0)
SMALL = Learner(step_s=2.0, keyframe_bytes=1e8, delta_bytes=1.25e6)


def simulated(profile: Profile, *, samplers: int, relays: int = 0, seed: int = 0) -> Report:
    fleet = Fleet(profile, samplers=samplers, relays=relays, seed=seed)
    fleet.run()
    return Report.of(fleet)


def test_one_sampler_that_is_slower_than_the_learner_sets_the_pace() -> None:
    """Two groups a batch, 5 s each; a delta of 1.25 MB takes .01 s up and .1 s down."""
    kind = Samplers(places=1, group_s=5.0, spread=0.0, link=Link(round_trip_s=0.0, down_mbit=100.0))
    profile = Profile(
        seconds=1000.0,
        run=Run(batch_groups=2),
        learner=SMALL,
        samplers=(kind,),
        learner_link=INSTANT,
        coordinator_link=INSTANT,
    )
    report = simulated(profile, samplers=1)
    assert report.version_s == pytest.approx(10.0, rel=0.02)
    assert statistics.median(report.spread_s) == pytest.approx(0.01 + 0.1, rel=0.01)
    # Of each batch one group was begun before the version that it is trained on.
    groups, mean, most = report.staleness["sampler"]
    assert (groups, most) == (2 * report.versions, 1)
    assert mean == pytest.approx(0.5, abs=0.02)
    assert report.saturated == "samplers' places"
    assert report.busy["samplers' places"][0] == pytest.approx(1.0, rel=0.02)
    assert report.busy["learner's steps"][0] == pytest.approx(0.2, rel=0.02)


def test_relays_take_the_weights_off_the_coordinators_uplink() -> None:
    profile = Profile(
        seconds=200.0, run=Run(batch_groups=8), learner=SMALL, samplers=(Samplers(group_s=4.0, places=2),)
    )
    straight, relayed = (simulated(profile, samplers=40, relays=n) for n in (0, 4))
    assert abs(straight.versions - relayed.versions) <= 2
    assert relayed.busy["coordinator's uplink"][1] < straight.busy["coordinator's uplink"][1] / 4
    assert relayed.busy["busiest relay's uplink"][1] > 0


def test_a_seed_is_a_run() -> None:
    profile = Profile(seconds=60.0, run=Run(batch_groups=8), learner=SMALL)
    first, again, other = (simulated(profile, samplers=20, relays=2, seed=n) for n in (1, 1, 2))
    assert first == again != other


def test_the_demo_goes_as_it_went() -> None:
    """The figures are those of a real run, 100 versions in 85.6 s, whose times and sizes are in demo.toml."""
    report = simulated(Profile.load(Path(__file__).with_name("demo.toml")), samplers=2)
    assert report.version_s == pytest.approx(0.856, rel=0.05)
    assert statistics.median(report.spread_s) == pytest.approx(1.48, rel=0.05)
    assert report.busy["coordinator's uplink"][1] == pytest.approx(9.2e6 + 2400 * 556, rel=0.05)
    for name, groups, mean in (("near", 1356, 3.60), ("far", 1044, 4.20)):
        simulated_groups, simulated_mean, _ = report.staleness[name]
        assert simulated_groups == pytest.approx(groups, rel=0.1)
        assert simulated_mean == pytest.approx(mean, rel=0.16)


def fairness(seconds: float) -> Profile:
    """Samplers of ten times another speed; one prompt in ten takes twenty times as long as the others."""
    fast, slow = Samplers(name="fast", group_s=3.0, places=8), Samplers(name="slow", group_s=30.0, places=8)
    return Profile(
        seconds=seconds,
        run=Run(
            batch_groups=32,
            concurrency_groups=256,
            buffer_groups=512,
            max_staleness_versions=8,
        ),
        learner=Learner(step_s=10.0, keyframe_bytes=1e8, delta_bytes=1e6),
        samplers=(fast, slow),
        prompts=Prompts(long_share=0.1, long_factor=20.0),
    )


def test_slow_samplers_are_not_starved_out() -> None:
    report = simulated(fairness(2400.0), samplers=16)
    groups = {name: groups for name, (groups, _, _) in report.staleness.items()}
    assert groups["slow"] >= 0.08 * groups["fast"]
    assert report.saturated == "learner's steps"


def test_the_command_prints_lines_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = tmp_path / "profile.toml"
    profile.write_text("seconds = 30\n[run]\nbatch_groups = 8\n[[samplers]]\ngroup_s = 3\n")
    asked = ["simulate", "--samplers", "20", "--relays", "2", "--profile", str(profile)]
    assert main(asked) == 0
    assert capsys.readouterr().out.splitlines()[0].startswith("versions    ")
    assert main([*asked, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["versions"] > 0


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("seconds = ", "Invalid value"),
        ("[learner]\nstep_s = 0", "learner.step_s: Input should be greater than 0"),
        ("[lerner]\nstep_s = 1", "lerner: Extra inputs"),
        ("[run]\nbatch_groups = 512", "no batch would ever fill"),
    ],
)
def test_a_profile_that_cannot_be_used_is_refused_with_the_key(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "profile.toml"
    path.write_text(text)
    with pytest.raises(StartupError, match=said):
        Profile.load(path)
    with pytest.raises(StartupError, match="No such file"):
        Profile.load(tmp_path / "nowhere.toml")
