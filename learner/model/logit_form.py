"""The form of the logits that a family makes of its output head: known from the configuration, and tried.

    logits = cap * tanh(scale * (head(hidden)) / cap)        without a cap: scale * head(hidden)

The table names the settings; whether a family divides by one or multiplies with it, and whether it does
anything else, shows when the model is run on a few tokens. Logits that are made otherwise have no form here:
the model makes them itself, of all positions at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

_SCALES: Final = {
    "logits_scaling": (-1, 1),  # Granite and MiniCPM3 divide, HyperCLOVA X multiplies
    "logits_mup_width_multiplier": (-1,),  # Inkling
    "logit_scale": (1,),  # Cohere
    "lm_head_multiplier": (1,),  # Falcon-H1
    "output_multiplier": (1,),  # Muse
}
"""Setting -> powers of it that logits may be multiplied with."""

_CAPS: Final = (
    "final_logit_softcapping",  # Gemma, NanoChat
    "logits_soft_cap",  # RecurrentGemma
    "output_logit_soft_cap",  # xLSTM
)
"""Settings that may bound logits."""

_LOUD: Final = 100.0
"""Largest product of the head that a form is tried on: a cap bends these, however quiet the weights are."""


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


def logit_form(model: PreTrainedModel) -> LogitForm | None:
    """Return the form of a model's logits; None: it is not known here.

    The model reads four tokens, with its head's products made loud.
    """
    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    if not isinstance(head, torch.nn.Linear):
        return None
    tokens = torch.arange(4, device=head.weight.device)[None] % head.weight.shape[0]
    with torch.no_grad():
        hidden = getattr(model.base_model(input_ids=tokens, use_cache=False), "last_hidden_state", None)
        if hidden is None:
            return None
        products: Tensor = head(hidden)
        gain = _LOUD / products.abs().max()

        def amplified(_module: object, _inputs: object, output: Tensor) -> Tensor:
            return output * gain

        handle = head.register_forward_hook(amplified)
        try:
            logits = model(input_ids=tokens, use_cache=False).logits
        finally:
            handle.remove()
        for form in _forms(model.config.get_text_config()):
            made = form.logits(gain * products)
            if made.shape == logits.shape and torch.allclose(made, logits, rtol=1e-4, atol=1e-4):
                return form
    return None


def _forms(config: PretrainedConfig) -> Iterator[LogitForm]:
    """Yield the forms that a configuration may mean, those that use more of its settings first."""
    scales = [
        value**power for key, powers in _SCALES.items() if (value := _number(config, key)) for power in powers
    ]
    caps = [value for key in _CAPS if (value := _number(config, key))]
    for cap, scale in product((*caps, None), (*scales, 1.0)):
        yield LogitForm(scale, cap)


def _number(config: PretrainedConfig, key: str) -> float | None:
    value: Any = getattr(config, key, None)
    return float(value) if isinstance(value, int | float) else None
