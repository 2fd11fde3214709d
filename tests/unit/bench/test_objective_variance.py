import math

import pytest
import torch

from bench.objective_variance import gaussian_cv2


@pytest.mark.parametrize("shift", [0.0, 0.4155, 1.0, 2.0])
@pytest.mark.parametrize("trust", [0.0, 0.3, 1.0])
def test_the_closed_form_is_the_integral(shift: float, trust: float) -> None:
    x = torch.linspace(-12, 16, 280_001, dtype=torch.float64)
    log_q, log_p = -(x**2) / 2, -((x - shift) ** 2) / 2
    q = torch.exp(log_q - torch.logsumexp(log_q, 0))
    weight = torch.exp(log_p - (1 - trust) * log_q)
    mean = float((q * weight).sum())
    cv2 = float((q * weight**2).sum()) / mean**2 - 1
    assert math.isclose(gaussian_cv2(shift, trust), cv2, rel_tol=1e-6, abs_tol=1e-9)


def test_gepo_varies_less_than_the_plain_ratio_beyond_nine_hundredths_of_a_nat() -> None:
    """In CV^2 the two cross at d = 0.4155."""
    assert gaussian_cv2(0.415, 1.0) > gaussian_cv2(0.415, 0.0)
    assert gaussian_cv2(0.416, 1.0) < gaussian_cv2(0.416, 0.0)
