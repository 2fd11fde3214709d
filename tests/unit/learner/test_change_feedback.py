"""Four contributors that learn digits: what a coarse code leaves over, handed in later, costs nothing."""

from typing import Final

import torch
from sklearn.datasets import load_digits  # type: ignore[import-untyped]
from torch import Tensor

from bench.shared.fed_back_encoder import FedBackEncoder
from learner.merging.changes.coder import decode_tensors
from learner.merging.merge_settings import MergeSettings
from support.changes import changed

SHAPES: Final = {
    "first": torch.Size([64, 64]),
    "first_bias": torch.Size([64]),
    "last": torch.Size([64, 10]),
    "last_bias": torch.Size([10]),
}
CONTRIBUTORS: Final = 4
ROUNDS: Final = 15
STEPS: Final = 10
TESTED: Final = 597


def error_percent(rules: MergeSettings, *, feeds_back: bool = True) -> float:
    """Return the error after ROUNDS means of changes of STEPS steps each."""
    images, labels = (torch.as_tensor(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = images[order].float() / 16, labels[order]
    source = torch.Generator().manual_seed(1)
    merged = {name: 0.1 * torch.randn(shape, generator=source) for name, shape in SHAPES.items()}
    locals_ = [{name: x.clone().requires_grad_() for name, x in merged.items()} for _ in range(CONTRIBUTORS)]
    optimizers = [torch.optim.Adam(masters.values(), lr=3e-3) for masters in locals_]
    encoders = [FedBackEncoder(rules, SHAPES) for _ in locals_]
    for _ in range(ROUNDS):
        mean = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        for masters, optimizer, encoder in zip(locals_, optimizers, encoders, strict=True):
            for name, master in masters.items():
                master.data.copy_(merged[name])
            for _ in range(STEPS):
                rows = torch.randint(TESTED, len(labels), (32,), generator=source)
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(logits(masters, images[rows]), labels[rows])
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            coder = encoder if feeds_back else FedBackEncoder(rules, SHAPES)
            payload = coder.encode(changed(masters, merged))
            for name, change in decode_tensors(payload, rules, SHAPES):
                mean[name] += change / CONTRIBUTORS
        merged = {name: (merged[name] + mean[name]).float() for name in merged}
    wrong = logits(merged, images[:TESTED]).argmax(-1) != labels[:TESTED]
    return 100 * float(wrong.double().mean())


def logits(masters: dict[str, Tensor], images: Tensor) -> Tensor:
    hidden = torch.relu(images @ masters["first"] + masters["first_bias"])
    return hidden @ masters["last"] + masters["last_bias"]


def test_low_rank_at_4_bits_costs_nothing_that_feedback_does_not_repair() -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the matrices are too small for more
    try:
        exact = error_percent(MergeSettings(compression="full"))
        assert error_percent(MergeSettings(compression="low_rank", rank=8)) < exact + 1
        without = error_percent(MergeSettings(compression="low_rank", rank=2), feeds_back=False)
        assert without > exact + 5
    finally:
        torch.set_num_threads(threads)
