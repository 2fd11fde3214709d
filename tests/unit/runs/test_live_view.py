import io

from rich.console import Console

from deploy.demo.plan import FAR
from deploy.runs.live_view import curve, line, table
from deploy.runs.observation import Metrics, Observation, Scrapes
from deploy.runs.records import Step
from node.values.policy import PolicyVersion
from node.values.roles import Role
from node.values.run import PeerStatus, RunStatus
from support.demo_records import make_steps


def _seen(steps: list[Step], *, status: RunStatus | None = None) -> Observation:
    scrapes = Scrapes()
    text = 'heterorl_node_transfer_bytes_total{kind="delta",direction="in"} 2500000.0\n'
    scrapes.put(FAR, 1, Metrics(f"# TYPE heterorl_node_transfer_bytes counter\n{text}"))
    return Observation(elapsed_s=12.0, steps=steps, status=status, scrapes=scrapes)


def _status() -> RunStatus:
    peer = PeerStatus(
        node_id=FAR,
        role=Role.SAMPLER,
        state="live",
        held=PolicyVersion(24),
        version_lag_versions=6,
        lag_s=1.5,
        last_seen_s=0.1,
        clock_offset_s=0.0,
        waits_for="prompt lease",
        verdicts={"trained": 30},
        staleness_mean_versions=6.0,
        joins=1,
        refused_twins=0,
        refused_twin_s=0.0,
    )
    return RunStatus("run", PolicyVersion(30), 1, (peer,), {}, {}, None, 0, "buffer", 0.0)


def _text(seen: Observation) -> str:
    console = Console(file=io.StringIO(), width=200)
    console.print(table(seen, goal="100"))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


def test_a_curve_has_one_bar_a_value_until_it_is_full_and_then_means() -> None:
    assert curve([0.0, 0.5, 1.0]) == "▁▅█"
    assert len(curve([0.5] * 1000)) == 60
    assert curve([0.0, 1.0] * 60) == "▅" * 60
    assert curve([]) == ""


def test_the_line_tells_version_reward_staleness_and_bytes() -> None:
    told = line(_seen(make_steps()), goal="100", samplers=[FAR])
    assert "version 30/100" in told
    assert "reward 0.90" in told
    assert f"{FAR} 6.0" in told
    assert f"{FAR} 2.5 MB" in told


def test_the_table_shows_each_peer_with_its_lag() -> None:
    told = _text(_seen(make_steps(), status=_status()))
    row = next(text for text in told.splitlines() if text.startswith(FAR))
    assert row.split() == [FAR, "live", "24", "6", "1.5", "6.0", "30", "2.5", "MB", "prompt", "lease"]


def test_the_table_says_so_when_there_is_no_step_or_no_coordinator() -> None:
    assert "waiting for the first step" in _text(_seen([]))
    assert "does not answer" in _text(_seen(make_steps()))
