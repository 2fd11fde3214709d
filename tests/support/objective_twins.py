"""Every objective of the menu once more: plain floats, loops, straight from the table of formulas.

A twin takes the learner's logprobs twice: ``p`` is differentiated, ``frozen`` holds the same
numbers where the formula stops the gradient.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

Rows = list[list[float]]


@dataclass(frozen=True, slots=True)
class Sample:
    """Completions of several prompts, without padding."""

    q: Rows
    group: list[int]
    reward: list[float]
    staleness: list[int]
    max_tokens: int
    proximal: Rows | None = None

    def members(self, i: int) -> list[int]:
        return [j for j, group in enumerate(self.group) if group == self.group[i]]

    def rewards_beside(self, i: int) -> list[float]:
        return [self.reward[j] for j in self.members(i)]


Twin = Callable[[Rows, Rows, Sample], float]


def centred(s: Sample) -> list[float]:
    return [r - fmean(s.rewards_beside(i)) for i, r in enumerate(s.reward)]


def standardised(s: Sample) -> list[float]:
    return [a / (stdev(s.rewards_beside(i)) + 1e-4) for i, a in enumerate(centred(s))]


def left_out(s: Sample) -> list[float]:
    return [r - fmean(s.reward[j] for j in s.members(i) if j != i) for i, r in enumerate(s.reward)]


def whitened(s: Sample) -> list[float]:
    a = centred(s)
    return [x / math.sqrt(sum(y * y for y in a) / (len(a) - 1) + 1e-8) for x in a]


def clip(x: float, low: float, high: float) -> float:
    return max(low, min(high, x))


def ppo(w: float, a: float, low: float = 0.2, high: float = 0.2) -> float:
    return -min(w * a, clip(w, 1 - low, 1 + high) * a)


def over_completions(losses: Sequence[float]) -> float:
    return fmean(losses)


def over_groups(losses: Sequence[float], s: Sample) -> float:
    return fmean(fmean(losses[i] for i in range(len(losses)) if s.group[i] == g) for g in set(s.group))


def over_tokens(losses: Rows) -> float:
    return fmean(x for row in losses for x in row)


def tokens(p: Rows, f: Callable[[int, int], float]) -> Rows:
    return [[f(i, t) for t in range(len(row))] for i, row in enumerate(p)]


def k3(p: float, q: float) -> float:
    return math.exp(p - q) - (p - q) - 1


def kl_of(i: int, frozen: Rows, s: Sample) -> float:
    return fmean(k3(p, q) for p, q in zip(frozen[i], s.q[i], strict=True))


def expectation(i: int, s: Sample) -> float:
    q = [math.exp(fmean(s.q[j])) for j in s.members(i)]
    return sum(x * x for x in q) / sum(q)


def _of_denominator(denominator: Callable[[int, Rows, Rows, Sample], float]) -> Twin:
    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        a = centred(s)
        return over_groups(
            [ppo(math.exp(fmean(p[i])) / denominator(i, p, frozen, s), a[i]) for i in range(len(p))], s
        )

    return twin


def _mean(i: int, p: Rows, frozen: Rows, s: Sample) -> float:
    return fmean(math.exp(fmean(s.q[j])) for j in s.members(i))


def _plus(i: int, p: Rows, frozen: Rows, s: Sample) -> float:
    return math.exp(fmean(s.q[i])) if kl_of(i, frozen, s) <= 0.01 else expectation(i, s)


def _defensive(i: int, p: Rows, frozen: Rows, s: Sample) -> float:
    return 0.2 * math.exp(fmean(frozen[i])) + 0.8 * math.exp(fmean(s.q[i]))


def _eqp(i: int, p: Rows, frozen: Rows, s: Sample) -> float:
    q = {j: math.exp(fmean(s.q[j])) for j in s.members(i)}
    return sum(x * math.exp(fmean(p[j])) for j, x in q.items()) / sum(q.values())


def _version_aware(
    lost: Callable[[int, Rows, Sample], float], *, power: float = 3.0, gated: float | None = None
) -> Twin:
    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        losses = []
        for i, a in enumerate(standardised(s)):
            f = lost(i, frozen, s)
            trust = f**power
            denominator = math.exp((1 - trust) * fmean(s.q[i])) * expectation(i, s) ** trust
            gate = (2 / (1 + math.exp(a * fmean(frozen[i])))) ** (f if gated is None else gated)
            losses.append(ppo(math.exp(fmean(p[i])) / denominator, a * gate))
        return over_groups(losses, s)

    return twin


def _lost_share(i: int, frozen: Rows, s: Sample) -> float:
    r = [math.exp(fmean(frozen[j]) - fmean(s.q[j])) for j in s.members(i)]
    return 1 - sum(r) ** 2 / (len(r) * sum(x * x for x in r))


def _saturated_kl(i: int, frozen: Rows, s: Sample) -> float:
    return 1 - math.exp(-kl_of(i, frozen, s) / 0.5)


def _drift_aware(*, move: float = 0.03, most: float = 0.5, divides: bool = True) -> Twin:
    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        losses = []
        for i, a in enumerate(standardised(s) if divides else centred(s)):
            limit = min(move * math.sqrt(max(s.staleness[i], 1)), most)
            ratios = [x - y for x, y in zip(frozen[i], s.q[i], strict=True)]
            mean = fmean(clip(x, -2.0, 2.0) for x in ratios)
            if (a > 0 and mean > limit) or (a < 0 and mean < -limit):
                losses.append(0.0)
                continue
            now = [math.exp(x - y) for x, y in zip(p[i], frozen[i], strict=True)]
            losses.append(-min(1, math.exp(fmean(ratios))) * a * fmean(now))
        return over_completions(losses)

    return twin


def gspo(p: Rows, frozen: Rows, s: Sample) -> float:
    a = standardised(s)
    return over_completions(
        [
            ppo(math.exp(fmean(x) - fmean(y)), a[i], 3e-4, 4e-4)
            for i, (x, y) in enumerate(zip(p, s.q, strict=True))
        ]
    )


def topr(p: Rows, frozen: Rows, s: Sample) -> float:
    losses = []
    for x, f, y, a in zip(p, frozen, s.q, centred(s), strict=True):
        ratio = math.exp(sum(f) - sum(y))
        losses.append(-(1.0 if a >= 0 else clip(ratio, 0, 1)) * a * sum(x))
    return over_completions(losses)


def _clipped_tokens(p: Rows, s: Sample, a: Sequence[float], high: float = 0.2) -> Rows:
    return tokens(p, lambda i, t: ppo(math.exp(p[i][t] - s.q[i][t]), a[i], 0.2, high))


def grpo(p: Rows, frozen: Rows, s: Sample) -> float:
    return over_completions([fmean(row) for row in _clipped_tokens(p, s, standardised(s))])


def dr_grpo(p: Rows, frozen: Rows, s: Sample) -> float:
    return sum(x for row in _clipped_tokens(p, s, centred(s)) for x in row) / (len(p) * s.max_tokens)


def dapo(p: Rows, frozen: Rows, s: Sample) -> float:
    buffer = 0.2 * s.max_tokens
    shaped = [
        r + clip((s.max_tokens - buffer - len(row)) / buffer, -1, 0)
        for r, row in zip(s.reward, p, strict=True)
    ]
    a = standardised(Sample(s.q, s.group, shaped, s.staleness, s.max_tokens))
    kept = [i for i in range(len(p)) if len(set(s.rewards_beside(i))) > 1]
    losses = _clipped_tokens(p, s, a, high=0.28)
    return over_tokens([losses[i] for i in kept])


def reinforce(p: Rows, frozen: Rows, s: Sample) -> float:
    a = centred(s)
    return over_tokens(tokens(p, lambda i, t: -a[i] * p[i][t]))


def dg(p: Rows, frozen: Rows, s: Sample) -> float:
    a = centred(s)
    return over_tokens(tokens(p, lambda i, t: -1 / (1 + math.exp(frozen[i][t] * a[i])) * a[i] * p[i][t]))


def cispo(p: Rows, frozen: Rows, s: Sample) -> float:
    a = standardised(s)
    return over_tokens(
        tokens(p, lambda i, t: -clip(math.exp(frozen[i][t] - s.q[i][t]), 0, 5) * a[i] * p[i][t])
    )


def _against_proximal(p: Rows, prox: Rows, s: Sample, factor: Callable[[float], float]) -> Rows:
    a = standardised(s)
    return tokens(
        p,
        lambda i, t: factor(math.exp(prox[i][t] - s.q[i][t])) * ppo(math.exp(p[i][t] - prox[i][t]), a[i]),
    )


def _token_means(losses: Rows) -> float:
    return over_completions([fmean(row) for row in losses])


def tis(p: Rows, frozen: Rows, s: Sample) -> float:
    return _token_means(_against_proximal(p, s.proximal or frozen, s, lambda rho: min(rho, 2)))


def _geometric(least: float, most: float, veto: float = 0) -> Twin:
    """GRPO against the proximal policy, all tokens times their completion's ratio where it is in the band."""

    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        prox, a, losses = s.proximal or frozen, standardised(s), []
        for i, row in enumerate(p):
            logs = [x - q for x, q in zip(prox[i], s.q[i], strict=True)]
            rho = math.exp(fmean(logs))
            stays = least <= rho <= most and all(math.exp(x) >= veto for x in logs)
            clipped = [ppo(math.exp(x - y), a[i]) for x, y in zip(row, prox[i], strict=True)]
            losses.append((rho if stays else 0.0) * fmean(clipped))
        return over_completions(losses)

    return twin


def _capped(beyond: Callable[[float], float]) -> Twin:
    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        return over_tokens(
            _against_proximal(p, s.proximal or frozen, s, lambda rho: rho if rho <= 1.2 else beyond(rho))
        )

    return twin


def _sapo(good: float, bad: float) -> Twin:
    def twin(p: Rows, frozen: Rows, s: Sample) -> float:
        a = standardised(s)

        def loss(i: int, t: int) -> float:
            tau = good if a[i] > 0 else bad
            return -4 / tau / (1 + math.exp(-tau * (math.exp(p[i][t] - s.q[i][t]) - 1))) * a[i]

        return _token_means(tokens(p, loss))

    return twin


def _grpo_dual_clipped(p: Rows, frozen: Rows, s: Sample) -> float:
    a = standardised(s)

    def loss(i: int, t: int) -> float:
        once = ppo(math.exp(p[i][t] - s.q[i][t]), a[i])
        return min(once, -1.3 * a[i]) if a[i] < 0 else once

    return _token_means(tokens(p, loss))


def decoupled_ppo(p: Rows, frozen: Rows, s: Sample) -> float:
    return over_tokens(_against_proximal(p, s.proximal or frozen, s, lambda rho: rho))


def decoupled_ppo_log_linear(p: Rows, frozen: Rows, s: Sample) -> float:
    def log_prox(i: int, t: int) -> float:
        share = 1 / max(1, s.staleness[i])
        return share * s.q[i][t] + (1 - share) * frozen[i][t]

    return over_tokens(_against_proximal(p, tokens(p, log_prox), s, lambda rho: rho))


def dppo_tv(p: Rows, frozen: Rows, s: Sample) -> float:
    a = standardised(s)

    def loss(i: int, t: int) -> float:
        moved = math.exp(frozen[i][t]) - math.exp(s.q[i][t])
        drops = (a[i] > 0 and moved > 0.2) or (a[i] < 0 and moved < -0.2)
        log_ratio = p[i][t] - s.q[i][t]
        return (0.0 if drops else -math.exp(log_ratio) * a[i]) + 1e-3 * log_ratio**2

    return over_tokens(tokens(p, loss))


TWINS: dict[str, Twin] = {
    "gepo": _of_denominator(lambda i, p, frozen, s: expectation(i, s)),
    "gepo_mean": _of_denominator(_mean),
    "gepo_plus": _of_denominator(_plus),
    "gepo_defensive": _of_denominator(_defensive),
    "eqp": _of_denominator(_eqp),
    "drift_aware": _drift_aware(),
    "version_aware": _version_aware(_lost_share),
    "version_aware_kl": _version_aware(_saturated_kl),
    "gspo": gspo,
    "topr": topr,
    "grpo": grpo,
    "dr_grpo": dr_grpo,
    "bnpo": lambda p, frozen, s: over_tokens(_clipped_tokens(p, s, standardised(s))),
    "dapo": dapo,
    "rloo": lambda p, frozen, s: over_tokens(_clipped_tokens(p, s, left_out(s))),
    "reinforce_plus_plus": lambda p, frozen, s: over_tokens(_clipped_tokens(p, s, whitened(s))),
    "reinforce": reinforce,
    "dg": dg,
    "sapo": _sapo(1.0, 1.05),
    "cispo": cispo,
    "tis": tis,
    "mis_geometric": _geometric(0, 5),
    "decoupled_ppo": decoupled_ppo,
    "dppo_tv": dppo_tv,
}
TWINS_WITH_OPTIONS: dict[str, tuple[str, dict[str, object], Twin]] = {
    "sapo, other rates": ("sapo", {"rate_good": 0.7, "rate_bad": 1.6}, _sapo(0.7, 1.6)),
    "grpo, dual clip": ("grpo", {"dual_clip": 1.3}, _grpo_dual_clipped),
    "mis_geometric, both ends": ("mis_geometric", {"least": 0.9, "most": 1.1}, _geometric(0.9, 1.1)),
    "mis_geometric, both ends, veto": (
        "mis_geometric",
        {"least": 0.8, "most": 1.5, "veto": 0.7},
        _geometric(0.8, 1.5, veto=0.7),
    ),
    "decoupled_ppo, cap masks": ("decoupled_ppo", {"behaviour_cap": 1.2}, _capped(lambda rho: 0.0)),
    "decoupled_ppo, cap truncates": (
        "decoupled_ppo",
        {"behaviour_cap": 1.2, "beyond_cap": "truncate"},
        _capped(lambda rho: 1.2),
    ),
    "decoupled_ppo, log-linear": ("decoupled_ppo", {"proximal": "log_linear"}, decoupled_ppo_log_linear),
    "drift_aware, other options": (
        "drift_aware",
        {"move_nats": 0.02, "most_nats": 0.03},
        _drift_aware(move=0.02, most=0.03),
    ),
    "drift_aware, undivided": (
        "drift_aware",
        {"divides_by_deviation": False},
        _drift_aware(divides=False),
    ),
    "version_aware, always gated": (
        "version_aware",
        {"gate": "always", "power": 2.0},
        _version_aware(_lost_share, power=2.0, gated=1.0),
    ),
    "version_aware, not gated": ("version_aware", {"gate": "none"}, _version_aware(_lost_share, gated=0.0)),
}
