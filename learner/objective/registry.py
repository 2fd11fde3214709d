"""Load an objective: from a name of the menu, or an import path, to a function with its options."""

import importlib
import typing
from collections.abc import Mapping
from dataclasses import dataclass

from learner.objective.batch import ObjectiveBatch, ObjectiveFunction, ObjectiveOutcome
from learner.objective.menu import MENU, check_name, check_options
from learner.objective.options import Options


@dataclass(frozen=True, slots=True)
class Objective:
    """An objective that is ready to be called."""

    name: str
    function: ObjectiveFunction
    options: Options
    is_separable: bool
    """See ``options.MenuEntry``. Others need the learner logprobs of the whole batch at once."""

    def __call__(self, batch: ObjectiveBatch) -> ObjectiveOutcome:
        """Return loss and weights of a batch."""
        return self.function(batch, self.options)


def load_objective(name: str, options: Mapping[str, object] | None = None) -> Objective:
    """Find an objective by its key in ``MENU`` or its import path, and check its options.

    A function of your own, ``package.module:function``, takes ``(batch, options)``, its second
    parameter annotated with a subclass of ``Options``. It is separable if it says so:
    ``function.is_separable = True``.

    Raises:
        ValueError: no such name, function or option (pydantic's ValidationError is a ValueError).
    """
    check_options(check_name(name), options or {})
    entry = MENU.get(name)
    function = _import(entry.path if entry else name)
    model = entry.options if entry else _options_of(function, name)
    is_separable = entry.is_separable if entry else bool(getattr(function, "is_separable", False))
    return Objective(name, function, model.model_validate(dict(options or {})), is_separable)


def _import(path: str) -> ObjectiveFunction:
    module, _, attribute = path.partition(":")
    try:
        function: ObjectiveFunction = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"objective {path!r} cannot be imported: {error}") from error
    if not callable(function):
        raise ValueError(f"objective {path!r} is not a function")
    return function


def _options_of(function: ObjectiveFunction, path: str) -> type[Options]:
    annotations = [type_ for name, type_ in typing.get_type_hints(function).items() if name != "return"]
    if len(annotations) == 2 and isinstance(annotations[1], type) and issubclass(annotations[1], Options):
        return annotations[1]
    raise ValueError(
        f"objective {path!r} must be annotated (batch: ObjectiveBatch, options: YourOptions), where "
        "YourOptions derives from learner.objective.options.Options"
    )
