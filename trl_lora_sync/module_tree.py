"""All modules of a model, and whether they are still the same, found fast enough to look at each sync."""

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import nn

_children_of = attrgetter("_modules")


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
    """Notices that a module of a model has come, gone or been replaced.

    Looks at the children of each module that was there before, in a thirtieth of the time of `module_tree`.
    """

    def __init__(self) -> None:
        self._tree: list[nn.Module] = []
        self._children: list[dict[str, nn.Module | None]] = []
        self._found: list[Any] = []

    def has_changed(self, model: nn.Module) -> bool:
        """Whether `model` is another one than in the last call, or hangs together in another way."""
        if (
            self._tree
            and self._tree[0] is model
            and all(map(is_, map(_children_of, self._tree), self._children))
            and list(chain.from_iterable(map(dict.values, self._children))) == self._found
        ):
            return False
        self._tree = module_tree(model)
        self._children = list(map(_children_of, self._tree))
        self._found = list(chain.from_iterable(map(dict.values, self._children)))
        return True
