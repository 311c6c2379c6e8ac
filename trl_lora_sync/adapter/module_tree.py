"""All modules of a model, found fast enough to look at each sync."""

from itertools import chain
from operator import attrgetter
from typing import Any

from torch import nn


def weight_of(module: Any) -> Any:
    """The weight of a layer, None if it has none. That of 504 matrices takes 0.05 ms instead of 0.3."""
    # The dictionary first: for each attribute that is a parameter, torch's modules call a function in Python.
    weight = module._parameters.get("weight")
    # FSDP1 has views of its flat parameter in their place.
    return getattr(module, "weight", None) if weight is None else weight


def module_tree(model: nn.Module) -> list[nn.Module]:
    """`model` and all modules below it, in an order that depends on nothing but how they hang together.

    For an 8B model with adapters it takes a tenth of the time of `model.modules()`, which passes each module through a
    generator for every level above it. A module that hangs in several places is listed as often.
    """
    tree = [model]
    for module in tree:  # which grows meanwhile
        if module._modules:
            tree += [child for child in module._modules.values() if child is not None]
    return tree


class ModuleTree:
    """How the modules of a model hang together at this moment."""

    def __init__(self, model: nn.Module) -> None:
        # Of the 3,000 modules of an 8B model with adapters, two of three have none below them, and get none: an adapter
        # takes the place of a module. To look at each would take twice as long, most of it waiting for memory.
        self._parents = [module for module in module_tree(model) if module._modules]
        self._children = self._look()

    def is_of(self, model: nn.Module) -> bool:
        """Whether no module of `model` has come, gone or been replaced since."""
        return self._parents[:1] == [model] and self._look() == self._children

    def _look(self) -> tuple[list[int], list[nn.Module | None]]:
        below = [*map(attrgetter("_modules"), self._parents)]
        # The numbers too: the children alone do not show a module that moves from the end of one parent to the next.
        return [*map(len, below)], [*chain.from_iterable(map(dict.values, below))]
