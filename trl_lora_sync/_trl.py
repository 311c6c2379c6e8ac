"""Every private TRL name this package touches. What a class or a signature shows is checked at import.

Read on TRL 1.11 to 1.16; the tests run on each. What we rely on:

- `trl.trainer.grpo_trainer.VLLMGeneration`, a module global that `GRPOTrainer.__init__` resolves when it builds its
  generation object; there is no argument to pass another class. The rebinding below can go once TRL takes one.
- `VLLMGeneration._init_vllm()`, `.sync_weights()` and `.generate(prompts, images, num_generations, profiler)`.
- what `VLLMGeneration.__init__` stores under the names of `_INIT_PARAMETERS`, and that it calls `_init_vllm()` last.
- `GRPOTrainer.vllm_generation`, `._metrics`, `._last_loaded_step`, which exist on instances only.
- `Trainer._save(output_dir, state_dict)` and `.is_fsdp_enabled` of Transformers; the former can go once its
  `save_model` saves PEFT adapters under FSDP with sharded state dicts.
- `trl.scripts.grpo`: `make_parser(prog=...)` and `main(*parsed)` take `GRPOConfig` and `GRPOTrainer` from `trl` when
  they are called; there is no argument to pass other classes.
- `trl.models.utils`: `remove_hooks(engine)` and `add_hooks(engine)` take DeepSpeed's ZeRO-3 hooks off a model and put
  them back, as TRL does for its own generation.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl
from packaging.version import Version
from safetensors.torch import save_file
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer

from trl_lora_sync.errors import UnsupportedTRLError

OLDEST, BELOW = Version("1.11"), Version("1.17.dev0")
_GENERATION_ATTRIBUTE = "VLLMGeneration"
_GENERATE_PARAMETERS = ("self", "prompts", "images", "num_generations", "profiler")
_INIT_PARAMETERS = frozenset(
    {
        "model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "temperature", "top_p",
        "top_k", "min_p", "repetition_penalty", "max_completion_length", "logprobs", "generation_kwargs",
    }
)  # fmt: skip
_rebinding = threading.RLock()  # a reward function may build a trainer of its own


@contextmanager
def generation_class(factory: Callable[..., VLLMGeneration]) -> Iterator[None]:
    """Let `GRPOTrainer.__init__` build its generation object with `factory`, and put TRL's class back afterwards."""
    with _rebinding:
        original = getattr(grpo_trainer, _GENERATION_ATTRIBUTE)
        setattr(grpo_trainer, _GENERATION_ATTRIBUTE, factory)
        try:
            yield
        finally:
            setattr(grpo_trainer, _GENERATION_ATTRIBUTE, original)


@contextmanager
def grpo_script(config: type, trainer: type) -> Iterator[ModuleType]:
    """TRL's `trl grpo` script, which finds `config` and `trainer` under TRL's names while the block lasts."""
    script = import_module("trl.scripts.grpo")
    for name in ("make_parser", "main"):
        if not callable(getattr(script, name, None)):
            raise _unsupported(f"trl.scripts.grpo has no {name}")
    with _rebinding:
        originals = {"GRPOConfig": trl.GRPOConfig, "GRPOTrainer": trl.GRPOTrainer}
        trl.GRPOConfig, trl.GRPOTrainer = config, trainer
        try:
            yield script
        finally:
            for name, original in originals.items():
                setattr(trl, name, original)


@contextmanager
def zero3_hooks_removed(engine: Any) -> Iterator[None]:
    """Let a model compute without DeepSpeed noting which parameters it needs next.

    DeepSpeed fetches ahead what an earlier forward pass used, and fails if this one, like TRL's with its fused
    log-probabilities, leaves some of it out.

    Args:
        engine: the `DeepSpeedEngine` around a model under ZeRO-3.
    """
    from trl.models.utils import add_hooks, remove_hooks

    remove_hooks(engine)
    try:
        yield
    finally:
        add_hooks(engine)


def record_metrics(trainer: Any, values: Mapping[str, float], *, latest: frozenset[str]) -> None:
    """Hand metrics to the trainer's own logging, which averages them between two logs.

    Args:
        latest: names of which the last value is logged instead of the mean.
    """
    metrics = trainer._metrics["train" if trainer.model.training else "eval"]
    for name, value in values.items():
        if name in latest:
            metrics[name] = [value]
        else:
            metrics[name].append(value)


def forget_last_sync(trainer: Any) -> None:
    """Make the trainer sync before it generates again, even at the same `global_step`."""
    trainer._last_loaded_step = -1


def saves_shards_only(trainer: Any) -> bool:
    """Whether Transformers' `save_model` leaves the model out because FSDP's state dicts are sharded."""
    if not trainer.is_fsdp_enabled:
        return False
    return "FULL_STATE_DICT" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def save_adapter(trainer: Any, output_dir: str | None, matrices: dict[str, torch.Tensor]) -> None:
    """Save adapter, tokenizer and arguments as Transformers' `save_model` does where nothing is sharded.

    The matrices are written by ourselves: PEFT 0.21 looks for the names of FSDP1's wrappers among them, finds none, and
    writes an empty file.

    Args:
        matrices: by their names in PEFT's files.
    """
    trainer._save(output_dir, state_dict={})
    save_file(matrices, Path(output_dir or trainer.args.output_dir) / "adapter_model.safetensors", {"format": "pt"})


def check_trl() -> None:
    """Raise unless the installed TRL has the names above.

    Raises:
        UnsupportedTRLError: says which TRL is supported.
    """
    found = Version(trl.__version__)
    if not OLDEST <= found < BELOW:
        raise _unsupported("it is outside that range")
    if not hasattr(grpo_trainer, _GENERATION_ATTRIBUTE):
        raise _unsupported("trl.trainer.grpo_trainer has no VLLMGeneration")
    for method in ("_init_vllm", "sync_weights", "generate"):
        if not callable(getattr(VLLMGeneration, method, None)):
            raise _unsupported(f"VLLMGeneration has no method {method}")
    if tuple(inspect.signature(VLLMGeneration.generate).parameters) != _GENERATE_PARAMETERS:
        raise _unsupported("VLLMGeneration.generate takes other parameters")
    missing = _INIT_PARAMETERS - set(inspect.signature(VLLMGeneration.__init__).parameters)
    if missing:
        raise _unsupported(f"VLLMGeneration takes no {', '.join(sorted(missing))}")


def _unsupported(reason: str) -> UnsupportedTRLError:
    return UnsupportedTRLError(
        f"trl-lora-sync supports TRL 1.11 to 1.16, and TRL {trl.__version__} is installed: {reason}. "
        "Install a supported one with: pip install 'trl>=1.11,<1.17'"
    )


check_trl()
