import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from deploy.demo.chaos import Fault
from deploy.demo.plan import FAR, NEAR, Plan
from deploy.demo.summary import Outcome, render, to_document
from deploy.runs.observation import Metrics, Scrapes
from deploy.runs.plot import plot, plot_by_lag
from deploy.runs.promises import Check
from support.demo_records import ledger_of, make_steps


def _outcome(*checks: Check) -> Outcome:
    scrapes = Scrapes()
    text = 'heterorl_node_transfer_bytes_total{kind="delta",direction="in"} 1000.0\n'
    scrapes.put(FAR, 1, Metrics(f"# TYPE heterorl_node_transfer_bytes counter\n{text}"))
    steps = make_steps()
    return Outcome(
        plan=Plan(seed=0, versions=30, has_chaos=True),
        run_id="demo-1",
        elapsed_s=61.0,
        steps=steps,
        ledger=ledger_of(steps),
        scrapes=scrapes,
        exit_codes={"learner": 0},
        faults=(Fault(NEAR, 8, at_s=1008.5, away_s=5.0),),
        checks=checks,
    )


KEPT = Check("the reward rises", True, "0.40 to 0.90")
BROKEN = Check("every process drained", False, "learner 1")


@pytest.mark.parametrize(("checks", "is_success"), [((KEPT,), True), ((KEPT, BROKEN), False)])
def test_one_broken_promise_makes_a_failure(checks: tuple[Check, ...], is_success: bool) -> None:
    assert _outcome(*checks).is_success is is_success
    assert to_document(_outcome(*checks))["is_success"] is is_success


def test_the_document_is_json_with_the_figures_of_each_sampler_and_fault() -> None:
    document = json.loads(json.dumps(to_document(_outcome(KEPT)), allow_nan=False))
    assert document["samplers"][FAR]["trained_groups"] == 30
    assert document["samplers"][FAR]["staleness_mean_versions"] == 6.0
    assert document["samplers"][FAR]["received_bytes"] == {"delta": 1000.0, "keyframe": 0}
    assert document["samplers"][NEAR]["staleness_max_versions"] == 1
    assert document["reward"]["at_first"] == pytest.approx(0.4)
    assert document["faults"][0]["name"] == NEAR
    assert document["checks"] == [{"promise": "the reward rises", "is_kept": True, "figures": "0.40 to 0.90"}]


def test_a_person_is_told_which_promise_was_broken() -> None:
    file = io.StringIO()
    Console(file=file, width=120).print(render(_outcome(KEPT, BROKEN)))
    assert "kept    the reward rises: 0.40 to 0.90" in file.getvalue()
    assert "BROKEN  every process drained: learner 1" in file.getvalue()


def test_the_plot_is_a_picture_even_where_a_sampler_has_no_point(tmp_path: Path) -> None:
    for number, steps in enumerate((make_steps(), make_steps(1))):
        path = tmp_path / f"{number}.png"
        plot(
            steps,
            path,
            title="demo-1",
            samplers=(NEAR, FAR),
            scores=[(0, 0.2)],
            marks=[(8, "sampler-1 killed")],
        )
        assert path.read_bytes().startswith(b"\x89PNG")


def test_divergence_by_lag_is_a_picture_once_a_lag_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "divergence.png"
    plot_by_lag(Metrics(), make_steps(), path)
    assert not path.exists()
    ages = {"4": (0.01, 0.002, 0.99), "8": (0.02, 0.001, 0.97), "64": ("NaN", "NaN", "NaN")}
    names = ("drift_nats", "drift_error_nats", "expected_ess_ratio")
    text = "".join(
        f"# TYPE heterorl_learner_{name} gauge\n"
        + "".join(f'heterorl_learner_{name}{{age_versions="{age}"}} {ages[age][n]}\n' for age in ages)
        for n, name in enumerate(names)
    )
    plot_by_lag(Metrics(text), make_steps(), path)
    assert path.read_bytes().startswith(b"\x89PNG")
