"""Log-probabilities of a prompt from the trainer's own model: of its base, under its adapter, or under a trial adapter.

The model is left exactly as it was: weights, frozen and trainable parameters, training and evaluation modes.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from trl_lora_sync.adapter.experts import is_read_directly
from trl_lora_sync.checks.verify import ImageProbe

T = TypeVar("T")
Prompt = Sequence[int] | ImageProbe
"""Token ids, of which all after the first are scored, or a prompt with an image, of which the last ones are."""

# Sizes of a trial adapter's output, in multiples of the size of its layer's input, tried in this order. The first one
# is about the size of what a layer computes itself. A model that reacts less, such as one in which only the queries are
# adapted, needs more.
_TRIAL_STRENGTHS = (0.5, 2.0, 8.0, 32.0)
# A trial adapter is strong enough once it moves log-probabilities by this share of their spread over the vocabulary.
# An unrelated policy is about 1.1 spreads away.
_STRONG_SHARE = 0.7
# Fixed, because the matrices are made again for each read, and must be what the scores were computed with.
_TRIAL_SEED = 20_011


def base_logprobs(
    model: Any, prompt: Prompt, neutral: Mapping[Any, Tensor | None], *, device: torch.device | None = None
) -> tuple[list[float], float]:
    """`TrainedBase.scores` of a model, of any prompt.

    Not with PEFT's own `disable_adapter()`, which makes every parameter of the active adapter trainable at its end,
    even if the user froze it, and takes a merged adapter out of the base (0.18 to 0.21).

    Args:
        neutral: what to compute with instead of the adapter, see `computing_with`; empty for a model without one.
        device: where a sharded model computes; `None` for where it is.
    """
    logprobs, ids = computing_with(neutral, lambda: _score(model, model, prompt, device))
    # Over the vocabulary first, and then the mean over the scored tokens.
    return _picked(logprobs, ids), float(logprobs.std(-1).mean())


def adapter_logprobs(
    model: Any, prompt: Prompt, *, forward: Any = None, device: torch.device | None = None
) -> list[float]:
    """Log-probability of each prompt token after the first under the active adapter.

    Args:
        model: the PEFT model.
        forward: the wrapper that a launcher has put around it, if the forward pass has to go through that.
        device: where a sharded model computes; `None` for where it is.
    """
    return _picked(*_score(model, forward or model, prompt, device))


# A trial adapter


def trial_weights(linears: Sequence[nn.Linear], strength: float, device: torch.device) -> dict[nn.Module, Tensor]:
    """Random matrices in the shapes of an adapter's; the same ones for the same arguments.

    Args:
        linears: `lora_A` and `lora_B` of each layer in turn.
        strength: how large the output of each layer's adapter is, relative to its input and before the scaling.

    Returns:
        For each linear module, a weight `(out_features, in_features)` in that module's dtype.
    """
    random = torch.Generator(device).manual_seed(_TRIAL_SEED)  # the generators of the training are not touched
    weights: dict[nn.Module, Tensor] = {}
    for lora_A, lora_B in zip(linears[::2], linears[1::2], strict=True):
        for linear, size in ((lora_A, 1.0), (lora_B, strength)):
            shape = (linear.out_features, linear.in_features)
            # In float32, as another dtype has other random numbers, and accelerate widens adapters that FSDP shards.
            weight = torch.randn(shape, generator=random, device=device, dtype=torch.float32)
            # So that the size of a layer's output does not depend on its width.
            weights[linear] = weight.mul_(size / linear.in_features**0.5).to(linear.weight.dtype)
    return weights


def neutral_weights(
    linears: Sequence[nn.Linear], initial: Mapping[nn.Module, Tensor], device: torch.device
) -> dict[nn.Module, Tensor]:
    """Matrices with which a served adapter changes nothing: zeros, or the matrices that the base weights lack.

    Args:
        linears: of which to make them.
        initial: the matrices that an initialisation took out of the base weights; empty if these are the checkpoint's.
    """
    return {
        linear: initial[linear].to(device)
        if linear in initial
        else torch.zeros(linear.out_features, linear.in_features, device=device, dtype=linear.weight.dtype)
        for linear in linears
    }


def trial_logprobs(
    model: Any,
    weights: Mapping[Any, Tensor | None],
    prompt: Prompt,
    *,
    forward: Any = None,
    device: torch.device | None = None,
) -> list[float]:
    """As `adapter_logprobs`, with other matrices than the adapter's.

    They take part as the outputs of the modules that hold the adapter's. PEFT's own code does the rest, and no
    parameter is written, however it is sharded.

    Args:
        weights: see `computing_with`.
    """
    return computing_with(weights, lambda: adapter_logprobs(model, prompt, forward=forward, device=device))


def computing_with(weights: Mapping[Any, Tensor | None], compute: Callable[[], T]) -> T:
    """What `compute` returns while linear modules compute with other weights.

    Unlike PEFT's way of computing without an adapter, this touches no parameter of these modules, so it works however a
    launcher has wrapped the model.

    Args:
        weights: by module; None for zeros. A parameter that no module computes with, and the weights of experts, must
            be whole: these have other data meanwhile.
    """
    before: list[tuple[nn.Parameter, Tensor]] = []
    hooks: list[RemovableHandle] = []
    instead: dict[nn.Module, Tensor | None] = {}

    def begin() -> None:
        for module, weight in weights.items():
            if isinstance(module, nn.Parameter) or is_read_directly(module):
                parameter = module if isinstance(module, nn.Parameter) else module.weight
                # Before the change, so that an error in it restores this parameter too.
                before.append((parameter, parameter.data))
                parameter.data = torch.zeros_like(parameter) if weight is None else weight.to(parameter.data)
            else:
                instead[module] = weight
                hooks.append(module.register_forward_hook(_from(instead)))

    def end() -> None:
        # First and in one step: an interrupt may have come between a hook and its place in the list.
        instead.clear()
        for parameter, data in reversed(before):
            parameter.data = data
        for hook in hooks:
            hook.remove()

    return _between(begin, end, compute)


def _between(begin: Callable[[], None], end: Callable[[], None], compute: Callable[[], T]) -> T:
    """What `compute` returns after `begin`.

    Args:
        end: undoes what was begun, as much as that is; may be called twice.
    """
    # Not a context manager: it is ended by Python code, and an interrupt may come before that has done anything.
    try:
        begin()
        return compute()
    finally:
        try:
            end()
        finally:
            end()  # an interrupt may have broken off the first


def _from(
    instead: Mapping[nn.Module, Tensor | None],
) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], Tensor | None]:
    def compute(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor | None:
        if module not in instead:
            return None  # the output stays
        weight = instead[module]
        if weight is None:
            return torch.zeros_like(output)
        bias = None if module.bias is None else module.bias.to(inputs[0])
        # PEFT has cast the input to the dtype of `lora_A` (`_cast_input_dtype`, 0.21). The output keeps the dtype that
        # the module itself gave it, which under autocast is another one.
        return nn.functional.linear(inputs[0], weight.to(inputs[0]), bias).to(output.dtype)

    return compute


def strong_trial(
    score: Callable[[float], list[float]], base: Sequence[float], spread: float
) -> tuple[float, list[float]]:
    """Find a trial adapter that no server could ignore without being noticed.

    Args:
        score: log-probabilities under a trial adapter of the given strength.
        base: log-probabilities of the same tokens without an adapter.
        spread: of the log-probabilities over the vocabulary.

    Returns:
        The smallest strength that moves the policy far, else the strength that moves it farthest; log-probabilities.
    """
    found: list[tuple[float, float, list[float]]] = []
    for strength in _TRIAL_STRENGTHS:
        logprobs = score(strength)
        change = sum(abs(there - here) for there, here in zip(logprobs, base, strict=True)) / len(logprobs)
        if change == change:  # not NaN, which an overflow in float16 may give
            found.append((change, strength, logprobs))
        if change >= _STRONG_SHARE * spread:
            break
    _, strength, logprobs = max(found, default=(0.0, _TRIAL_STRENGTHS[0], list(base)))
    return strength, logprobs


# The model's state


def _in_evaluation_mode(forward: Any, compute: Callable[[], T]) -> T:
    """What `compute` returns while every module is in evaluation mode; each is in its own mode afterwards."""
    modes = [(module, module.training) for module in forward.modules()]

    def begin() -> None:
        forward.eval()
        for module, _ in modes:
            # In evaluation mode on a CPU, bitsandbytes 0.50 packs a 4-bit weight again in place (nn/modules.py
            # `Linear4bit.forward`), and FSDP finds another dtype on this process than on the others. In training mode
            # the layer computes the same. FSDP replaces the weight by one without `quant_state`; the layer keeps it.
            if hasattr(module, "quant_state"):
                module.training = True

    def end() -> None:
        for module, mode in modes:
            # Not by `module.train(mode)`, which would set the modules below it as well.
            module.training = mode

    return _between(begin, end, compute)


@torch.no_grad()
def _score(model: Any, forward: Any, prompt: Prompt, device: torch.device | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities over the vocabulary before each scored token, `(tokens, vocab)`, and these, `(tokens,)`."""
    device = device or model.device
    if isinstance(prompt, ImageProbe):
        inputs, scored = {name: one.to(device) for name, one in prompt.inputs.items()}, prompt.scored
    else:
        inputs, scored = {"input_ids": torch.tensor([list(prompt)], device=device)}, len(prompt) - 1
    with _not_compiled():
        logits = _in_evaluation_mode(forward, lambda: forward(**inputs).logits)
    # In float32, so that the softmax rounds nothing on top of the model's own dtype.
    # The logits at a position are of the token after it, so the last position scores nothing.
    logits = logits[0, :-1][-scored:].float()
    return logits.log_softmax(-1), inputs["input_ids"][0, -scored:]


def _not_compiled() -> AbstractContextManager[Any]:
    """Run a compiled model as plain Python in the block.

    A graph made here would keep the hooks of a trial adapter for the training, as torch (2.13) does not guard hooks.
    """
    # Without the module nothing is compiled, and its import takes seconds.
    is_used = "torch._dynamo" in sys.modules
    return torch.compiler.set_stance("force_eager") if is_used else nullcontext()


def _picked(logprobs: Tensor, ids: Tensor) -> list[float]:
    picked: list[float] = logprobs.gather(-1, ids[:, None])[:, 0].tolist()
    return picked
