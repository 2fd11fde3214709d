"""A causal language model cut into stages of a pipeline, by transformers' plan for the family.

    first stage      what comes before the layers (the embedding), and a run of layers
    middle stages    a run of layers
    last stage       a run of layers, what comes after them (the norm), and the head

Each stage runs the model's own forward pass, in which a module of another stage is a placeholder: masks and
positions are made as ever, and names of tensors stay what they are. A tied embedding lies on the first stage
and on the last, the two of which add up its gradient.
"""

import copy
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor
from transformers import PreTrainedModel

from learner.model.sliced_loading import small_model
from node.errors import StartupError

LAYERS: Final = "layers"


class Absent(torch.nn.Module):
    """A module that another stage has; a layer among them passes hidden states through."""

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states."""
        return hidden


class Entry(Absent):
    """The first layer, on a later stage: what the stage before has made of it and of others.

    Some families scale or normalise what they are given as embeddings; that has happened once already.
    """

    def __init__(self) -> None:
        super().__init__()
        self._received: Tensor | None = None

    def receive(self, _: torch.nn.Module, __: Any, named: Mapping[str, Any]) -> None:
        """Keep the hidden states that the model's forward pass is called with: a forward pre-hook."""
        self._received = named["inputs_embeds"]

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the hidden states received, once."""
        received, self._received = self._received, None
        assert received is not None
        return received


def layers_of(stage: int, *, stages: int, layers: int) -> range:
    """Return the layers of a stage; where they do not divide, the first stages have one more.

    The last stage has the head, which costs as much as some layers.
    """
    each, more = divmod(layers, stages)
    first = stage * each + min(stage, more)
    return range(first, first + each + (stage < more))


def has_tied_head(model: PreTrainedModel) -> bool:
    """Return whether the head is the embedding."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    weight = getattr(head, "weight", None)
    return weight is not None and weight is getattr(embedding, "weight", None)


def check_stages(model: PreTrainedModel, *, stages: int) -> None:
    """Check that a whole model can be cut into stages which together compute the same.

    Two stages of two layers with a few tokens are tried.

    Raises:
        StartupError: it cannot.
    """
    name = type(model).__name__
    instead = "Set pp = 1, and dp_shard or tp to make up for it."
    plan = _plan(model)
    if plan is None:
        raise StartupError(
            f"pp = {stages}, and transformers has no plan that cuts {name} into stages: no list of "
            f"layers named {LAYERS!r}, or parts beside it",
            fix=instead,
        )
    layers = len(getattr(model.base_model, LAYERS))
    if stages > layers:
        raise StartupError(
            f"pp = {stages} is more than the model's {layers} layers",
            fix=f"Set pp to {layers} at most, and dp_shard or tp to make up for it.",
        )
    small = small_model(model.config, layers=2)
    if small is None or not _is_same_in_stages(small):
        raise StartupError(
            f"pp = {stages}, and {name} does not compute the same in stages as it does whole: its "
            "layers share more than hidden states",
            fix=instead,
        )


def keep_stage(model: PreTrainedModel, stage: int, *, stages: int) -> None:
    """Keep one stage of a model that ``check_stages`` has found fit, in place."""
    plan = _plan(model)
    assert plan is not None
    before, after = plan
    base, is_last = model.base_model, stage == stages - 1
    keeps_embedding = stage == 0 or (is_last and has_tied_head(model))
    keeps_head = is_last or (stage == 0 and has_tied_head(model))
    embedding = model.get_input_embeddings()
    for name in before if stage > 0 else ():
        if not (keeps_embedding and getattr(base, name) is embedding):
            setattr(base, name, Absent())
    for name in () if is_last else after:
        setattr(base, name, Absent())
    if not keeps_head:
        model.set_output_embeddings(Absent())  # type: ignore[no-untyped-call]
    layers = getattr(base, LAYERS)
    here = layers_of(stage, stages=stages, layers=len(layers))
    for number in set(range(len(layers))) - set(here):
        layers[number] = Absent()
    if stage > 0:
        layers[0] = entry = Entry()
        base.register_forward_pre_hook(entry.receive, with_kwargs=True)


def _plan(model: PreTrainedModel) -> tuple[list[str], list[str]] | None:
    """Return what of the base model comes before the layers and what after; None: not known.

    Everything with parameters has to be in the plan, or it would be on every stage.
    """
    plan = list(getattr(model.config.get_text_config(), "base_model_pp_plan", None) or ())
    base = model.base_model
    if LAYERS not in plan or not isinstance(getattr(base, LAYERS, None), torch.nn.ModuleList):
        return None
    named = {name: getattr(base, name, None) for name in plan}
    modules = [*named.values(), model.get_output_embeddings()]  # type: ignore[no-untyped-call]
    if not all(isinstance(module, torch.nn.Module) for module in modules):
        return None
    of_plan = {id(parameter) for module in modules for parameter in module.parameters()}
    if any(id(parameter) not in of_plan for parameter in model.parameters()):
        return None
    at = plan.index(LAYERS)
    return plan[:at], plan[at + 1 :]


@torch.no_grad()
def _is_same_in_stages(small: PreTrainedModel) -> bool:
    ids = torch.arange(4)[None]
    try:
        whole = small.base_model(input_ids=ids, use_cache=False).last_hidden_state
        hidden: dict[str, Tensor] = {"input_ids": ids}
        for stage in range(2):
            shared = {id(parameter): parameter for parameter in small.parameters()}
            part = copy.deepcopy(small, shared)
            keep_stage(part, stage, stages=2)
            hidden = {"inputs_embeds": part.base_model(**hidden, use_cache=False).last_hidden_state}
    except (AttributeError, AssertionError, TypeError, ValueError, RuntimeError, KeyError, IndexError):
        return False
    return torch.allclose(hidden["inputs_embeds"], whole, rtol=1e-4, atol=1e-4, equal_nan=True)
