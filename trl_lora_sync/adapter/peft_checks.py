"""What adapter sync relies on in PEFT, looked for in the version that is installed.

A PEFT that was never tested is used if a tiny adapter of its making has everything that is read from a real one, and
computes what a server would compute with it.
"""

import logging
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import peft
import torch
from packaging.version import Version
from torch import nn

from trl_lora_sync.errors import UnsupportedPEFTError
from trl_lora_sync.versions import PEFT, warn

logger = logging.getLogger(__name__)

# All different, and the scaling is not 1, so that a swapped shape or a missing scaling shows.
_R, _ALPHA, _IN, _OUT = 2, 6, 3, 4
_NAME, _PATH = "default", "base_model.model.linear"
# Tolerance of float32 on a product of so few numbers.
_CLOSE = 1e-5


# An error is not cached, so it is raised at each call.
@cache
def check_peft() -> None:
    """Look at the installed PEFT, once in a process; draws nothing from the random state.

    Raises:
        UnsupportedPEFTError: what it has in another form, and which PEFT was tested.
    """
    if PEFT.is_too_old(peft.__version__):
        raise UnsupportedPEFTError(
            f"PEFT {peft.__version__} is installed, and adapter sync needs {PEFT.oldest} or later. Install one with: "
            f"pip install 'peft>={PEFT.oldest}'"
        )
    # Of the CPU only: the tiny model is there, and by default the states of all GPUs would be read as well.
    with torch.random.fork_rng(devices=[]):
        changes = list(_changes())
    if changes:
        newest = Version(f"{PEFT.newest.major}.{PEFT.newest.minor + 1}")
        raise UnsupportedPEFTError(
            f"PEFT {peft.__version__} is installed, which adapter sync cannot use: {'; '.join(changes)}. "
            f"Tested with PEFT {PEFT.tested}. Install one of these with: pip install 'peft>={PEFT.oldest},<{newest}'"
        )
    warn(logger, PEFT.caution(peft.__version__))


class _Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(_IN, _OUT, bias=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.linear(x)


def _changes() -> Iterator[str]:
    """What of the following is otherwise, in words; each part needs those before it."""
    try:
        # PEFT's default sets lora_B to zero, and an adapter that changes nothing would prove nothing.
        config = peft.LoraConfig(r=_R, lora_alpha=_ALPHA, target_modules=["linear"], init_lora_weights=False)
        base = _Tiny()
        model = peft.get_peft_model(base, config)
    # Whatever a changed PEFT raises, the user gets a sentence with the versions that work.
    except Exception as error:
        yield f"a model with a LoRA adapter cannot be made ({type(error).__name__}: {error})"
        return
    lacking = [name for name in ("base_model_name_or_path", "fan_in_fan_out") if not hasattr(config, name)]
    lacking += [
        name
        for name in ("peft_config", "active_adapter", "active_adapters", "active_peft_config")
        if not hasattr(model, name)
    ]
    yield from (f"there is no {name} where it was" for name in lacking)
    if lacking:
        return
    if list(model.active_adapters) != [_NAME] or model.active_adapter != _NAME or list(model.peft_config) != [_NAME]:
        yield f"the adapter of a new model is not {_NAME!r}"
        return
    yield from _layer_changes(model)


def _layer_changes(model: Any) -> Iterator[str]:
    try:
        from peft.tuners.lora import LoraLayer
    except ImportError as error:
        yield f"peft.tuners.lora has no LoraLayer ({error})"
        return
    layer = dict(model.named_modules()).get(_PATH)
    if not isinstance(layer, LoraLayer):
        yield f"there is no LoraLayer at {_PATH}"
        return
    expected: dict[str, Callable[[Any], bool]] = {
        "lora_A": lambda found: isinstance(found[_NAME], nn.Linear) and found[_NAME].weight.shape == (_R, _IN),
        "lora_B": lambda found: isinstance(found[_NAME], nn.Linear) and found[_NAME].weight.shape == (_OUT, _R),
        "scaling": lambda found: float(found[_NAME]) == _ALPHA / _R,
        "lora_embedding_A": lambda found: _NAME not in found,
        "lora_variant": lambda found: _NAME not in found,
        "merged": lambda found: not found,
        "in_features": lambda found: found == _IN,
        "out_features": lambda found: found == _OUT,
    }
    changes = [
        f"{name} of a LoRA layer {how}" for name, holds in expected.items() if (how := _differs(layer, name, holds))
    ]
    names = {f"{_PATH}.lora_{which}.{_NAME}.weight" for which in "AB"}
    if not names <= {name for name, _ in model.named_parameters()}:
        changes.append(f"the matrices are not named {' and '.join(sorted(names))}")
    # Only a layer of the known form can be computed with below.
    yield from changes or _computed_changes(model, layer)


def _differs(layer: Any, name: str, holds: Callable[[Any], bool]) -> str | None:
    if not hasattr(layer, name):
        return "is gone"
    try:
        return None if holds(getattr(layer, name)) else "has another form"
    except (TypeError, KeyError, AttributeError):
        return "has another form"


def _computed_changes(model: Any, layer: Any) -> Iterator[str]:
    """Whether the adapter adds `scaling * lora_B @ lora_A`, and nothing once it is disabled."""
    x = torch.linspace(-1, 1, _IN).unsqueeze(0)
    lora_A, lora_B = layer.lora_A[_NAME].weight, layer.lora_B[_NAME].weight
    with torch.no_grad():
        for matrix in (lora_A, lora_B):
            # Not what PEFT draws, which may be so small that another function of the product is close to it.
            matrix.copy_(torch.linspace(-1, 2, matrix.numel()).view_as(matrix))
        change = x @ (lora_B @ lora_A).T * (_ALPHA / _R)
        try:
            adapted = model(x)
            with model.disable_adapter():
                base = model(x)
        except Exception as error:
            yield f"a model with a LoRA adapter cannot be run with and without it ({type(error).__name__}: {error})"
            return
    if not torch.allclose(adapted - base, change, atol=_CLOSE):
        yield "a LoRA layer computes something other than scaling * lora_B @ lora_A"
