"""What is trained beside the matrices of linear layers: DoRA's magnitudes, biases, whole modules, embeddings, tokens.

A server that applies adapters to each token has no place for these. Fused serving computes the served weight from them,
in the form that `engine_plugins.fused_file` describes. Knows PEFT's layers; parameters that are sharded must not come
here.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from trl_lora_sync.adapter.canonical import KEY_PREFIX, ExtraTensors
from trl_lora_sync.adapter.initial import initial_of
from trl_lora_sync.adapter.names import ServedNames, trained_path
from trl_lora_sync.adapter.support import is_embedding_module, refuse, refuse_scaled_embedding
from trl_lora_sync.errors import UnsupportedAdapterError

_TRIAL_SEED = 20_012


# `eq=False`, as comparing two parameters would compare their elements.
@dataclass(frozen=True, kw_only=True, eq=False)
class Extra:
    """One trained parameter beside the matrices of linear layers.

    Attributes:
        path: of its module in the served model.
        key: of the tensor in the file.
        owner, name: where the trained parameter is.
        form: makes the tensor, in float32, of a value of the parameter and the dtype of the file.
        neutral: makes the value that changes nothing in the model, of the parameter, and of no trained value: a server
            that restarts is tried with what the trainer computed before the training.
        trial_size: how large the elements of a trial adapter's change are, before its strength, of the neutral value.
            None to leave it out of trials.
        tokens: if rows of an embedding are replaced, how many it has and which ones.
    """

    path: str
    key: str
    owner: nn.Module
    name: str
    form: Callable[[Tensor, torch.dtype], Tensor]
    neutral: Callable[[Tensor], Tensor]
    trial_size: Callable[[Tensor], float] | None = None
    tokens: tuple[int, tuple[int, ...]] | None = None

    @property
    def parameter(self) -> nn.Parameter:
        """The trained one at this moment; `load_state_dict(assign=True)` replaces it, and no module with it."""
        return cast("nn.Parameter", self.owner._parameters[self.name])

    def trial(self, strength: float, random: torch.Generator) -> Tensor:
        """A random value of the parameter that changes the model."""
        neutral = self.neutral(self.parameter)
        assert self.trial_size is not None
        size = strength * self.trial_size(neutral)
        noise = torch.randn(neutral.shape, generator=random, device=random.device, dtype=torch.float32)
        return neutral + (size * noise).to(neutral)


@torch.no_grad()
def read_extras(extras: Iterable[Extra], instead: Mapping[Any, Tensor], dtype: torch.dtype) -> ExtraTensors:
    """Copy extras.

    Args:
        instead: other values than the trained ones, by parameter.
        dtype: of the file.
    """
    read = ExtraTensors()
    for one in extras:
        parameter = one.parameter
        read.tensors[one.key] = one.form(instead.get(parameter, parameter.detach()), dtype)
        if one.tokens is not None:
            read.tokens[one.path] = one.tokens
    return read


def neutral_extras(extras: Iterable[Extra]) -> dict[Any, Tensor]:
    """The values that change nothing, by parameter."""
    return {one.parameter: one.neutral(one.parameter) for one in extras}


def trial_extras(extras: Iterable[Extra], strength: float, device: torch.device) -> dict[Any, Tensor]:
    """Random values that change the model, by parameter; the same ones for the same arguments."""
    random = torch.Generator(device).manual_seed(_TRIAL_SEED)  # the generators of the training are not touched
    return {one.parameter: one.trial(strength, random) for one in extras if one.trial_size is not None}


def find_extras(model: Any, adapter_name: str, layers: Mapping[str, Any]) -> list[Extra]:
    """The extras of an adapter, in model order.

    Args:
        layers: PEFT's LoRA layers that carry the adapter, by their paths in the trained model.

    Raises:
        UnsupportedAdapterError: the server's weights could not be made what the trainer computes with.
    """
    from peft.utils.other import ModulesToSaveWrapper, TrainableTokensWrapper

    names = ServedNames.of(model)
    found: list[Extra] = []
    for path, layer in layers.items():
        served = names.served(path)
        is_scaled = adapter_name in getattr(layer, "lora_magnitude_vector", {})
        if adapter_name in layer.lora_embedding_A:
            if is_scaled:
                raise refuse_scaled_embedding()
            found += _of_embedding(served, layer, adapter_name)
        if is_scaled:
            found.append(_magnitude(served, layer, adapter_name))
        if adapter_name in layer.lora_B and getattr(layer.lora_B[adapter_name], "bias", None) is not None:
            found.append(_bias(served, layer, adapter_name))
    # Also by what the model uses a module for, as Bloom's embedding has another name.
    ends = _ends(model) if _is_tied(model) else set()
    changes_embeddings = any(is_embedding_module(path) or layer in ends for path, layer in layers.items())
    # These wrappers are not LoRA layers, so `layers` lacks them.
    for path, wrapper in model.named_modules():
        if isinstance(wrapper, ModulesToSaveWrapper) and adapter_name in wrapper.modules_to_save:
            saved = _saved_module(names.served(trained_path(path)), wrapper, adapter_name)
            # Of this wrapper only, as `found` may hold tokens, which PEFT trains in both weights of a tied model.
            changes_embeddings |= any(is_embedding_module(one.path) for one in saved)
            changes_embeddings |= any(module in ends for module in wrapper.modules())
            found += saved
        if isinstance(wrapper, TrainableTokensWrapper):
            found += _tokens(model, names.served(trained_path(path)), wrapper.token_adapter, adapter_name)
    if changes_embeddings and _is_tied(model):
        raise refuse(
            "An adapter on the embedding or the output head of a model that ties both",
            "the server has one weight for the two, and PEFT trains one of them only",
            "Leave them out of target_modules and modules_to_save. trainable_token_indices trains tokens of both",
        )
    keys = [one.key for one in found]
    if twice := {key for key in keys if keys.count(key) > 1}:
        raise UnsupportedAdapterError(
            f"{sorted(twice)[0]!r} is trained in two ways at once, and a server can be given one of them. Leave the "
            "module out of target_modules, modules_to_save or trainable_token_indices."
        )
    return found


def _ends(model: Any) -> set[Any]:
    """The embedding and the output head, as PEFT has wrapped them."""
    return {getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")}


def _is_tied(model: Any) -> bool:
    config: Any = getattr(model, "config", None)
    # Checkpoints older than Transformers 5 have the flag of a model with several parts in its text part.
    configs = [config, config.get_text_config()] if hasattr(config, "get_text_config") else [config]
    return any(getattr(one, "tie_word_embeddings", False) for one in configs)


def _as_trained(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.float()


def _of_embedding(path: str, layer: Any, name: str) -> list[Extra]:
    """As matrices of a linear layer with the embedding's weight, `(num_embeddings, embedding_dim)`.

    Source: peft/tuners/lora/layer.py `Embedding.get_delta_weight`, 0.18 to 0.21.
    """
    # PEFT adds `(B @ A).T` to the weight. So A.T is the lora_B of the served matrix, and B.T its lora_A.
    tall, wide = layer.lora_embedding_A, layer.lora_embedding_B

    def size(neutral: Tensor) -> float:
        # A sum of `rank` random terms grows with the square root of the rank. The change is then as large as the
        # embedding itself.
        return _size_of(layer.get_base_layer().weight) / (float(layer.scaling[name]) * math.sqrt(neutral.shape[0]))

    return [
        Extra(
            path=path,
            key=f"{KEY_PREFIX}{path}.lora_A.weight",
            owner=wide,
            name=name,
            form=lambda value, dtype: value.float().T,
            # The other matrix is zero then, so this one may have any values, and a trial changes only one of the two.
            neutral=_random_like,
        ),
        Extra(
            path=path,
            key=f"{KEY_PREFIX}{path}.lora_B.weight",
            owner=tall,
            name=name,
            form=lambda value, dtype: value.float().T * float(layer.scaling[name]),
            neutral=torch.zeros_like,
            trial_size=size,
        ),
    ]


def _magnitude(path: str, layer: Any, name: str) -> Extra:
    """As two vectors, whose sum has twice the digits of one.

    A magnitude scales a whole row. bfloat16 rounds it by up to 0.4 %, which is more than many steps change it.
    """

    def form(value: Tensor, dtype: torch.dtype) -> Tensor:
        value = value.float()
        # The second vector is what rounding the first one loses. `fused_weights` adds both in float32.
        rounded = value.to(dtype).float()
        return torch.stack([rounded, value - rounded])

    def neutral(parameter: Tensor) -> Tensor:
        from peft.utils.integrations import dequantize_module_weight

        weight: Tensor = dequantize_module_weight(layer.get_base_layer()).detach().float()
        if (initial := initial_of(layer.lora_A[name])) is not None:
            lora_A, lora_B = (one.to(weight) for one in (initial.lora_A, initial.lora_B))
            # PEFT begins with the norms of base and adapter together (tuners/lora/dora.py `update_layer`, 0.21).
            weight = torch.addmm(weight, lora_B, lora_A, alpha=initial.scaling)
        norms: Tensor = torch.linalg.vector_norm(weight, dim=1)
        return norms.to(parameter)

    return Extra(
        path=path,
        key=f"{KEY_PREFIX}{path}.lora_magnitude_vector.weight",
        owner=layer.lora_magnitude_vector[name],
        name="weight",
        form=form,
        neutral=neutral,
        trial_size=lambda neutral: 0.5 * _size_of(neutral),
    )


def _bias(path: str, layer: Any, name: str) -> Extra:
    if getattr(layer.get_base_layer(), "bias", None) is None:
        raise refuse(
            f"LoraConfig(lora_bias=True) on {path!r}",
            "the layer has no bias, so the server has no place for one. PEFT cannot merge it either",
            "Leave it out of target_modules, or set lora_bias=False",
        )
    return Extra(
        path=path,
        key=f"{KEY_PREFIX}{path}.lora_B.bias",
        owner=layer.lora_B[name],
        name="bias",
        # PEFT scales the output of lora_B with its bias (0.21, `Linear.forward`).
        form=lambda value, dtype: value.float() * float(layer.scaling[name]),
        neutral=torch.zeros_like,
        trial_size=lambda neutral: 1.0,
    )


def _saved_module(path: str, wrapper: Any, name: str) -> list[Extra]:
    saved, extras = wrapper.modules_to_save[name], []
    for inner, _ in saved.named_parameters():
        if not re.search(r"(^|\.)(weight|bias)$", inner):
            raise refuse(
                f"LoraConfig(modules_to_save=...) with {path!r}",
                f"it holds the parameter {inner!r}, and only weights and biases are known to a server by their names",
                "Leave it out of modules_to_save",
            )
        extras.append(
            Extra(
                path=path,
                key=f"{KEY_PREFIX}{path}.{inner}",
                owner=saved.get_submodule(inner.rpartition(".")[0]),
                name=inner.rpartition(".")[2],
                form=_as_trained,
                # Bound as a default, because the variable of the loop has moved on when this is called.
                neutral=lambda _, inner=inner: wrapper.original_module.get_parameter(inner).detach(),  # type: ignore[misc]
                trial_size=_size_of,
            )
        )
    return extras


def _tokens(model: Any, path: str, adapter: Any, name: str) -> list[Extra]:
    """Source: peft/tuners/trainable_tokens/layer.py, 0.18 to 0.21: the parameter is the rows, not what they gain."""
    if name not in adapter.token_indices or adapter.tied_adapter is not None:
        return []  # a tied adapter holds nothing: the other one has the parameter
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if _is_tied(model) and getattr(getattr(head, "token_adapter", None), "tied_adapter", None) is not adapter:
        raise refuse(
            f"LoraConfig(trainable_token_indices=...) on {path!r} alone",
            "the model ties the embedding and the output head, so the server has one weight for both, and PEFT trains "
            "the tokens of one",
            "Give trainable_token_indices as a list",
        )
    indices = tuple(int(one) for one in adapter.token_indices[name])
    return [
        Extra(
            path=path,
            key=f"{KEY_PREFIX}{path}.token_adapter.trainable_tokens_delta",
            owner=adapter.trainable_tokens_delta,
            name=name,
            form=_as_trained,
            neutral=lambda parameter: adapter.trainable_tokens_original[name].to(parameter),
            # Without `trial_size`, as the prompt of a trial need not contain any of these tokens.
            tokens=(int(adapter.get_base_layer().weight.shape[0]), indices),
        )
    ]


def _random_like(parameter: Tensor) -> Tensor:
    """Elements of the size 1, the same ones for each parameter of a shape, whatever its dtype."""
    random = torch.Generator(parameter.device).manual_seed(_TRIAL_SEED)
    shape, device = parameter.shape, parameter.device
    return torch.randn(shape, generator=random, device=device, dtype=torch.float32).to(parameter)


def _size_of(tensor: Tensor) -> float:
    """The root of the mean square of its elements."""
    return float(tensor.detach().float().pow(2).mean().sqrt())
