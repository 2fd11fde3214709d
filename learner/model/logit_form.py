"""The form of the logits that a family makes of its output head: measured, and then tried.

    logits = cap * tanh(scale * head(hidden) / cap)        without a cap: scale * head(hidden)

Products of the head that are faint show the scale, and deafening ones the cap. Logits that are made otherwise
have no form here: the model makes them itself, of all positions at once.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_FAINT: Final = 1e-6
_LOUD: Final = 100.0
_DEAFENING: Final = 1e9
"""Largest product of the head, in three trials: far below any cap, where a cap bends, and far above it."""

_EXACT: Final = 1e-5
"""A number that is measured is the setting, or one over it, that differs from it by this part at most."""


@dataclass(frozen=True, slots=True)
class LogitForm:
    """How logits come from the products of hidden states and head."""

    scale: float = 1.0
    cap: float | None = None
    """Bound of the absolute value; None: there is none."""

    def logits(self, products: Tensor) -> Tensor:
        """Return the logits of products, element by element."""
        scaled = products * self.scale
        return scaled if self.cap is None else self.cap * torch.tanh(scaled / self.cap)


PLAIN: Final = LogitForm()


@torch.no_grad()
def logit_form(model: PreTrainedModel) -> LogitForm | None:
    """Return the form of a model's logits; None: it is not known here.

    The model reads four tokens, with its head's products made faint, loud and deafening.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        return None
    tokens = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    hidden = getattr(model.base_model(input_ids=tokens, use_cache=False), "last_hidden_state", None)
    if hidden is None:
        return None
    products: Tensor = head(hidden)

    def logits(largest: float) -> tuple[Tensor, Tensor]:
        """Return products the largest of which is this, and what the model makes of them."""
        gain = largest / products.abs().max()
        handle = head.register_forward_hook(lambda _module, _inputs, output: output * gain)
        try:
            return gain * products, model(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()

    (faint, scaled), (loud, bent) = logits(_FAINT), logits(_LOUD)
    if scaled.shape != faint.shape:
        return None
    config = model.config.get_text_config()
    scale = _setting(config, float((faint * scaled).sum() / faint.square().sum()))
    bound = float(logits(_DEAFENING)[1].abs().max())
    is_capped = bound < _DEAFENING * abs(scale) / 2
    form = LogitForm(scale, _setting(config, bound) if is_capped else None)
    return form if torch.allclose(form.logits(loud), bent, rtol=1e-4, atol=1e-4) else None


def _setting(config: PretrainedConfig, measured: float) -> float:
    """Return a measured number as the configuration has it, without the error of measurement."""
    told = (value for value in vars(config).values() if isinstance(value, int | float) and value)
    exact = (number for value in told for number in (1.0, float(value), 1 / value))
    nearest = min(exact, key=lambda number: abs(number - measured), default=measured)
    return nearest if math.isclose(nearest, measured, rel_tol=_EXACT) else measured
