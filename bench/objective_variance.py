"""How denominators change weights and gradients as policies part: the figures of learner/objective/README.md.

    python -m bench.objective_variance          one minute, one core -> bench/results/objective_variance/

Gaussian family: p = N(d, 1), q = N(0, 1), by closed forms.
Discrete family: softmax policies over 32 actions whose logits differ by noise of growing size; groups
are drawn from q, weights come from learner.objective, and the policy gradient they make is compared
with the exact one. Nothing is clipped: this is about denominators, and the gate of ``version_aware``.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

import matplotlib.pyplot as plt
import torch
from torch import Tensor

from learner.objective.formulas.advantage import centred_advantage, standardised_advantage
from learner.objective.formulas.divergence import kl_behaviour_learner
from learner.objective.formulas.importance import (
    expectation_weight,
    log_defensive_mixture,
    log_expected_learner,
    log_group_expectation,
    log_group_mean,
    log_version_aware_denominator,
    trust_by_divergence,
    trust_by_sample_size,
)
from learner.objective.formulas.trust_regions import fading_delight_gate
from learner.objective.groups import Groups

RESULTS: Final = Path(__file__).parent / "results" / "objective_variance"
GROUP_SIZE: Final = 8
ACTIONS: Final = 32
FAMILIES: Final = 12
"""Pairs of policies each point is averaged over."""
GROUPS: Final = 4096
BATCHES: Final = (8, 64)
"""Groups a gradient is the mean of."""
SHIFTS: Final = (0.0, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 4.0)
POWERS: Final = (1.0, 2.0, 3.0, 4.0)

Denominator = Callable[[Tensor, Tensor, Groups], Tensor]
Row = dict[str, float | str]


def _version_aware(power: float) -> Denominator:
    def denominator(p: Tensor, q: Tensor, groups: Groups) -> Tensor:
        trust = trust_by_sample_size(p - q, groups, power=power)
        return log_version_aware_denominator(q, log_group_expectation(q, groups), trust)

    return denominator


def _version_aware_kl(p: Tensor, q: Tensor, groups: Groups) -> Tensor:
    trust = _lost_by_divergence(p, q, groups) ** 3
    return log_version_aware_denominator(q, log_group_expectation(q, groups), trust)


def _lost_by_sample_size(p: Tensor, q: Tensor, groups: Groups) -> Tensor:
    return trust_by_sample_size(p - q, groups, power=1.0)


def _lost_by_divergence(p: Tensor, q: Tensor, _: Groups) -> Tensor:
    return trust_by_divergence(kl_behaviour_learner(p, q), scale_nats=0.5)


DENOMINATORS: Final[Mapping[str, Denominator]] = {
    "p/q": lambda p, q, groups: q,
    "gepo": lambda p, q, groups: log_group_expectation(q, groups),
    "gepo_mean": lambda p, q, groups: log_group_mean(q, groups),
    "eqp": lambda p, q, groups: log_expected_learner(p, q, groups),
    "gepo_defensive": lambda p, q, groups: log_defensive_mixture(p, q, share=0.2),
    "version_aware_kl": _version_aware_kl,
    **{f"version_aware, power {power:g}": _version_aware(power) for power in POWERS},
}
GATED: Final[Mapping[str, tuple[str, Denominator]]] = {
    "version_aware, gated": ("version_aware, power 3", _lost_by_sample_size),
    "version_aware_kl, gated": ("version_aware_kl", _lost_by_divergence),
}
"""Name -> denominator, and what fades the gate in: the objectives whole, standardised advantages too."""
PLOTTED: Final = ("p/q", "gepo", "gepo_defensive", "version_aware, power 3", *GATED)


def gaussian_cv2(shift: float, trust: float) -> float:
    """Return CV^2 of p / q^(1-a) under q: (1+a)/sqrt(1+2a) exp(2 d^2/(1+2a) - d^2/(1+a)) - 1."""
    square = shift**2
    exponent = 2 * square / (1 + 2 * trust) - square / (1 + trust)
    return (1 + trust) / math.sqrt(1 + 2 * trust) * math.exp(exponent) - 1


def gaussian_rows() -> list[Row]:
    """Return CV^2, and where the weighted samples are centred, for p/q, GEPO and a = (1 - ESS)^3."""
    rows: list[Row] = []
    for shift in (0.05 * step for step in range(61)):
        trusts = {"p/q": 0.0, "gepo": 1.0, "version_aware": -math.expm1(-(shift**2))}
        trusts["version_aware"] **= 3
        for name, trust in trusts.items():
            rows.append(
                {
                    "weight": name,
                    "kl_nats": shift**2 / 2,
                    "trust": trust,
                    "cv2": gaussian_cv2(shift, trust),
                    "centre_share": 1 / (1 + trust),
                }
            )
    return rows


def discrete_rows() -> list[Row]:
    """Return, for each denominator and shift, CV^2 of the weights and cosines to the exact gradient."""
    rows: list[Row] = []
    for shift in SHIFTS:
        sums: dict[str, Tensor] = {}
        for seed in range(FAMILIES):
            for name, measured in _measure_family(shift, seed).items():
                sums[name] = sums.get(name, torch.zeros(len(measured))) + measured / FAMILIES
        for name, mean in sums.items():
            kl, mean_weight, cv2, *cosines, cosine_of_mean = mean.tolist()
            row: Row = {"weight": name, "kl_nats": kl, "mean_weight": mean_weight, "cv2": cv2}
            row |= {f"cosine_{batch}_groups": cosine for batch, cosine in zip(BATCHES, cosines, strict=True)}
            rows.append(row | {"cosine_of_mean": cosine_of_mean})
    return rows


def _measure_family(shift: float, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(ACTIONS, generator=generator, dtype=torch.float64)

    logits = 2 * normal()
    q, p = torch.log_softmax(logits, 0), torch.log_softmax(logits + shift * normal(), 0)
    reward = (torch.rand(ACTIONS, generator=generator) < 0.3).double()
    exact = p.exp() * (reward - (p.exp() * reward).sum())
    drawn = torch.multinomial(q.exp(), GROUPS * GROUP_SIZE, replacement=True, generator=generator)
    groups = Groups.of(torch.arange(GROUPS).repeat_interleave(GROUP_SIZE))
    advantage = centred_advantage(reward[drawn], groups)
    standardised = standardised_advantage(reward[drawn], groups)
    kl = (q.exp() * (q - p)).sum()
    measured = {}
    pulls = {name: (denominator, advantage) for name, denominator in DENOMINATORS.items()}
    for name, (denominator, lost) in GATED.items():
        fade_in = lost(p[drawn], q[drawn], groups)
        gate = fading_delight_gate(p[drawn], standardised, fade_in, temperature=1.0)
        pulls[name] = (DENOMINATORS[denominator], standardised * gate)
    for name, (denominate, pull) in pulls.items():
        weight = expectation_weight(p[drawn], denominate(p[drawn], q[drawn], groups))
        gradients = _gradients(weight * pull, drawn, groups, p)
        cosines = [_cosine(gradients.reshape(-1, batch, ACTIONS).mean(1), exact) for batch in BATCHES]
        measured[name] = torch.stack(
            [
                kl,
                weight.mean(),
                weight.var() / weight.mean() ** 2,
                *cosines,
                _cosine(gradients.mean(0), exact),
            ]
        )
    return measured


def _gradients(coefficient: Tensor, drawn: Tensor, groups: Groups, p: Tensor) -> Tensor:
    """Return each group's gradient at the logits, [groups, actions]: sum_i c_i (one hot(y_i) - p)."""
    chosen = p.new_zeros(groups.count, ACTIONS).index_put((groups.index, drawn), coefficient, accumulate=True)
    return chosen - chosen.sum(dim=1, keepdim=True) * p.exp()


def _cosine(estimates: Tensor, exact: Tensor) -> Tensor:
    return torch.cosine_similarity(estimates, exact.expand_as(estimates), dim=-1).mean()


def plot(path: Path, rows: list[Row], *, weights: Iterable[str], columns: Mapping[str, str]) -> None:
    """Draw n / ESS = 1 + CV^2, and one panel a column, over KL."""
    count = 1 + len(columns)
    figure, panels = plt.subplots(1, count, figsize=(5 * count, 3.6))
    for name in weights:
        chosen = [row for row in rows if row["weight"] == name]
        kl = [row["kl_nats"] for row in chosen]
        panels[0].plot(kl, [1 + float(row["cv2"]) for row in chosen], label=name)
        for panel, column in zip(panels[1:], columns, strict=True):
            panel.plot(kl, [row[column] for row in chosen], label=name)
    for panel, label in zip(panels, ("n / ESS = 1 + CV²", *columns.values()), strict=True):
        panel.set(xlabel="KL(q || p), nats", ylabel=label)
        panel.set_xscale("symlog", linthresh=0.05)
        panel.grid(alpha=0.3)
    panels[0].set_yscale("log")
    panels[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    """Compute and draw."""
    torch.set_num_threads(1)
    RESULTS.mkdir(parents=True, exist_ok=True)
    gaussian, discrete = gaussian_rows(), discrete_rows()
    plot(
        RESULTS / "gaussian.png",
        gaussian,
        weights=("p/q", "gepo", "version_aware"),
        columns={"centre_share": "centre of the weighted samples / d"},
    )
    plot(
        RESULTS / "discrete.png",
        discrete,
        weights=PLOTTED,
        columns={
            f"cosine_{BATCHES[0]}_groups": f"cosine to the exact gradient, {BATCHES[0]} groups",
            "cosine_of_mean": "cosine of the expected gradient",
        },
    )


if __name__ == "__main__":
    main()
