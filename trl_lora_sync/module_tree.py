"""All modules of a model, found fast enough to look at each sync."""

from torch import nn


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
