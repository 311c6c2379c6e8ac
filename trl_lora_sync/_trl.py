"""Every private TRL name this package touches; `trl_checks` looks for them before they are used.

Read on TRL 1.11 to 1.16; the tests run on each. What we rely on:

- `VLLMGeneration`, a global of the trainer's module, or imported inside its `__init__` from
  `trl.generation.vllm_generation`, where it builds its generation object; there is no argument to pass another class.
  The rebinding below can go once TRL takes one.
- `is_vllm_available`, a global of some trainers' modules, called there before the generation object is built.
- `VLLMGeneration._init_vllm()`, `.sync_weights()` and `.generate(prompts, images, num_generations, profiler)`.
- with a base that is shared with vLLM: `create_model_from_path(path, **kwargs)`, a global of a trainer's module, takes
  `device_map`, and `Trainer._move_model_to_device(model, device)` of Transformers moves the model. Without these, it is
  on the GPU for a moment before vLLM loads its own.
- in colocate mode: `LLM`, a global of `trl.generation.vllm_generation`, of which `_init_vllm()` builds `.llm`, and
  `.llm.generate(...)`, which `generate` samples with; `.tensor_parallel_size`, and `._llm_weights_sleeping` (1.14 on).
- `_tool_call_loop(...)` of the trainers that have tools, which samples on some processes only, and syncs on none.
- what `VLLMGeneration.__init__` stores under the names of its parameters, and that it calls `_init_vllm()` afterwards.
- `vllm_generation`, `_metrics` and one of `LAST_SYNC_FIELDS` of a trainer, which exist on instances only.
- `_step`, or `_buffer_step`, and `_buffered_inputs` of a trainer that trains on one batch of samples in several steps.
- with `lora_sync_overlap`: `Trainer.get_batch_samples(epoch_iterator, num_batches, device)` of Transformers, and of a
  trainer `_prepare_inputs(batch)`, which samples when `_step` is a multiple of `args.steps_per_generation *
  num_iterations` or `_buffered_inputs` is None, `_tokenize_prompts(prompts)` and the key "importance_sampling_ratio" of
  `_buffered_inputs`; also `GradientState.end_of_dataloader` of accelerate.
- `trl.trainer.utils.RepeatSampler`, found by its name below `callback_handler.train_dataloader`, and its `generator`,
  for the first batch of the next epoch; without it that batch is not sampled ahead.
- `Trainer._save(output_dir, state_dict)` and `.is_fsdp_enabled` of Transformers; the former can go once its
  `save_model` saves PEFT adapters under FSDP with sharded state dicts.
- `trl.scripts.grpo` and its siblings: `make_parser(prog=...)` and `main(*parsed)` take the configuration and the
  trainer from `trl` when they are called; there is no argument to pass other classes.
- `trl.cli.accelerate_config.resolve_accelerate_config_argument(arguments)`, as `trl grpo` uses it.
- of `trl.experimental.async_grpo` (1.14 on): `AsyncRolloutWorker`, a global of the trainer's module, where the trainer
  builds it, with `start`, `stop`, `check_health`, `update_model_version`, `rollout_buffer`, `metrics_queue` and
  `_loop_kwargs`; `_AsyncRolloutLoop`, of which `generation.rollouts` overrides how the next prompt is taken, one sample
  is made, one request is sent and a group is scored; the trainer's `_sync_weight()`, `model_version`, and
  `args.token_budget`. It adds up metrics with `total` in their names, and averages pairs of a sum and a count.
- `_attn_implementation` of a configuration of Transformers, which its models read in each forward pass; and that TRL
  replaces the `forward` of a model on the instance.
- `trl.models.utils`: `remove_hooks(engine)` and `add_hooks(engine)` take DeepSpeed's ZeRO-3 hooks off a model and put
  them back, as TRL does for its own generation.
"""

import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import trl
from safetensors.torch import save_file

from trl_lora_sync.trl_checks import (
    ASYNC_WORKER,
    ENGINE_CLASS,
    GENERATION_CLASS,
    GENERATION_MODULE,
    LAST_SYNC_FIELDS,
    LOADER,
    check_launcher,
    check_script,
    check_trl,
    trl_classes,
)

# At the import, before anything derives from TRL's classes or replaces a name of TRL.
check_trl()

_AVAILABLE = "is_vllm_available"
# Of no step, also when a frequency is added to it.
_NEVER_SYNCED = -(1 << 31)
# Held while names of TRL are replaced: of two trainers built at once, one would restore the factory of the other.
_rebinding = threading.RLock()  # a reward function may build another trainer


@contextmanager
def generation_class(trainer_class: type, factory: Callable[..., Any]) -> Iterator[None]:
    """Let a trainer build its generation object with `factory` where vLLM is not installed, and undo it afterwards."""
    modules = {sys.modules[one.__module__] for one in trl_classes(trainer_class)}
    # The trainers of Distillation and GOLD raise without vLLM before they build the object (1.16).
    names = {GENERATION_CLASS: factory, _AVAILABLE: lambda *_, **__: True}
    places = [(module, name) for module in modules for name in names]
    # For the trainers of SDPO and SDFT, which import the class when they are built (1.16).
    # Our generation classes derive from this name, so they are imported before the block (`trainers._build`).
    places.append((import_module(GENERATION_MODULE), GENERATION_CLASS))
    # A trainer's module has these names only if it imports them at its top.
    with _rebinding, _replaced({place: names[place[1]] for place in places if hasattr(*place)}):
        yield


@contextmanager
def engine_class(factory: Callable[..., Any]) -> Iterator[None]:
    """Let TRL's generation object build its engine with `factory` in colocate mode, and undo it afterwards."""
    with _rebinding, _replaced({(import_module(GENERATION_MODULE), ENGINE_CLASS): factory}):
        yield


@contextmanager
def rollout_worker_class(trainer_class: type, factory: Callable[..., Any]) -> Iterator[None]:
    """Let an asynchronous trainer build its rollout worker with `factory`, and undo it afterwards."""
    modules = {sys.modules[one.__module__] for one in trl_classes(trainer_class)}
    with _rebinding, _replaced({(one, ASYNC_WORKER): factory for one in modules if hasattr(one, ASYNC_WORKER)}):
        yield


@contextmanager
def models_on_host(trainer_class: type) -> Iterator[None]:
    """Let a trainer load its model into the host's memory; TRL loads it to the GPU, with `device_map="auto"` (1.16)."""
    modules = {sys.modules[one.__module__] for one in trl_classes(trainer_class)}
    places = [(module, LOADER) for module in modules if hasattr(module, LOADER)]

    # TRL itself passes `device_map=None` under DDP and DeepSpeed. Otherwise the default on a GPU is "auto" (1.16).
    def on_host(load: Callable[..., Any]) -> Callable[..., Any]:
        # A `device_map` that the user has set in `model_init_kwargs` wins.
        return lambda *args, **kwargs: load(*args, **{"device_map": None} | kwargs)

    with _rebinding, _replaced({place: on_host(getattr(*place)) for place in places}):
        yield


@contextmanager
def plain_forward(model: Any) -> Iterator[None]:
    """Let the model of an asynchronous trainer compute the logits of one plain prompt in the block.

    TRL gives it an attention for packed trees of prompts, which needs the layout of the tree (1.16) and a GPU that
    computes in half precision; and a forward pass without logits, which needs labels (1.14).

    Args:
        model: the PEFT model.
    """
    # By identity, as submodules share configurations, and each is put back once.
    configs: dict[int, Any] = {id(one.config): one.config for one in model.modules() if hasattr(one, "config")}
    before = [(one, one._attn_implementation) for one in configs.values() if getattr(one, "_attn_implementation", None)]
    base = model.get_base_model()
    # TRL sets it on the instance. Without that, the class's own is found.
    forward = vars(base).pop("forward", None)
    try:
        for config, _ in before:
            config._attn_implementation = "sdpa"
        yield
    finally:
        for config, attention in before:
            config._attn_implementation = attention
        if forward is not None:
            base.forward = forward


@contextmanager
def script(name: str, config: type, trainer: type) -> Iterator[ModuleType]:
    """TRL's script of that name, such as `grpo`, which finds both classes under TRL's names while the block lasts."""
    check_script(name)
    places = {(trl, one.__name__): one for one in (config, trainer)}
    with _rebinding, _replaced(places):
        yield import_module(f"trl.scripts.{name}")


def accelerate_options(arguments: Sequence[str]) -> list[str]:
    """What `accelerate launch` is given for `arguments`, with TRL's own configurations by their names.

    Raises:
        ValueError: there is no such configuration.
    """
    check_launcher()
    from trl.cli.accelerate_config import resolve_accelerate_config_argument

    return list(resolve_accelerate_config_argument(list(arguments)))


@contextmanager
def _replaced(values: Mapping[tuple[ModuleType, str], Any]) -> Iterator[None]:
    # All are read before any is replaced, so a name that cannot be read leaves everything as before.
    originals = {place: getattr(*place) for place in values}
    try:
        for place, value in values.items():
            setattr(*place, value)
        yield
    finally:
        for place, original in originals.items():
            setattr(*place, original)


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
    # The asynchronous trainer has metrics of training only, and averages pairs of a sum and a count (1.16).
    is_async = hasattr(trainer, "rollout_worker")
    metrics = trainer._metrics["train" if is_async or trainer.model.training else "eval"]
    for name, value in values.items():
        if name in latest:
            # TRL logs the mean of each list (1.11 to 1.16), which is the value itself.
            metrics[name] = [value]
        else:
            # The asynchronous trainer adds up values whose name has the word `total`, such as `lora_sync/total_s`,
            # and takes the largest if it has `max`. A pair is averaged whatever its name is (`_reduce_metric`, 1.16).
            metrics[name].append((value, 1.0) if is_async else value)


def forget_last_sync(trainer: Any) -> None:
    """Make the trainer sync before it generates again, even at the same `global_step`."""
    # GOLD and IW-OPD have the second of these, and the others have the first (1.16).
    for name in LAST_SYNC_FIELDS:
        if hasattr(trainer, name):
            setattr(trainer, name, _NEVER_SYNCED)


def forget_batch(trainer: Any) -> None:
    """Make the trainer sample before it trains, also if an earlier training ended in the middle of a batch."""
    # IW-OPD counts in the second of these, and the others in the first (1.11 to 1.16).
    for name in ("_step", "_buffer_step"):
        if hasattr(trainer, name):
            setattr(trainer, name, 0)
    # The asynchronous trainer has none (1.16).
    if hasattr(trainer, "_buffered_inputs"):
        trainer._buffered_inputs = None


def batches_until_generation(trainer: Any) -> int:
    """How many batches after the next one the trainer samples again."""
    # In micro-batches, as `_step` counts these (1.16).
    every = trainer.args.steps_per_generation * trainer.num_iterations
    return int(every - trainer._step % every)


def generation_is_due(trainer: Any) -> bool:
    """Whether the trainer samples for the batch that it is given next, in training."""
    # The condition of TRL's own `_prepare_inputs` (1.11 to 1.16); `check_overlap` looks for it in the source.
    return bool(trainer.model.training) and (
        trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0
        or trainer._buffered_inputs is None
    )


def tokenized(trainer: Any, batch: Sequence[Mapping[str, Any]]) -> list[list[int]] | None:
    """The prompts of a batch as the trainer will tokenize them; None if they have images as well."""
    if any(name in row for row in batch for name in ("image", "images")):
        return None
    # The trainer may change messages in place.
    prompts, images, _ = trainer._tokenize_prompts(copy.deepcopy([row["prompt"] for row in batch]))
    return None if images else [list(ids) for ids in prompts]


def batch_of_next_epoch(trainer: Any, place: int) -> Any | None:
    """A batch of the epoch after this one, without moving any random state.

    Returns:
        None if the order does not come from TRL's `RepeatSampler` alone, or the epoch is shorter.
    """
    loader = trainer.callback_handler.train_dataloader
    sampler = batches = getattr(loader, "batch_sampler", ())
    # accelerate's shards have a `batch_sampler` (1.15, data_loader.py), and torch's batches a `sampler`.
    # None is looked for, and not the truth of a sampler, which is its length: that of a stream has none (torch 2.13).
    while sampler is not None and type(sampler).__name__ != "RepeatSampler":
        sampler = getattr(sampler, "batch_sampler", getattr(sampler, "sampler", None))
    if sampler is None:
        return None
    generator = getattr(sampler, "generator", None)
    # `RepeatSampler` draws the order of an epoch from it (1.16), so the next epoch would otherwise have another order.
    state = generator.get_state() if generator is not None else None
    try:
        indices = next(itertools.islice(batches, place, None), None)
    finally:
        if generator is not None:
            generator.set_state(state)
    # Without an iterator of the loader, which would draw a seed (torch 2.13, utils/data/dataloader.py).
    return None if indices is None else loader.collate_fn([loader.dataset[index] for index in indices])


def masked_share(trainer: Any) -> float:
    """**Collective.** The share of sequences of the last batch that the importance sampling correction left out."""
    # One entry for each of `steps_per_generation` micro-batches.
    masked = torch.cat([_is_masked(batch) for batch in trainer._buffered_inputs])
    return float(trainer.accelerator.gather(masked.float()).mean())


def _is_masked(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """For each sequence, whether the weight of every token that is trained on is zero."""
    # The masks have the shape (B, T), and the ratio (B, T), or (B, 1) in TRL's two sequence modes (1.16).
    is_trained_on = batch["completion_mask"].bool()
    if batch.get("tool_mask") is not None:
        is_trained_on &= batch["tool_mask"].bool()
    is_left_out = ((batch["importance_sampling_ratio"] == 0) | ~is_trained_on).all(dim=-1)
    # With `mask_truncated_completions`, TRL itself leaves all of a sequence out (1.16), whatever its ratio is.
    return is_left_out & is_trained_on.any(dim=-1)


def saves_shards_only(trainer: Any) -> bool:
    """Whether Transformers' `save_model` leaves the model out because FSDP's state dicts are sharded."""
    if not trainer.is_fsdp_enabled:
        return False
    # The same test of the same text as in `save_model` of Transformers (5.24).
    return "FULL_STATE_DICT" not in str(trainer.accelerator.state.fsdp_plugin.state_dict_type)


def save_adapter(trainer: Any, output_dir: str | None, matrices: dict[str, torch.Tensor]) -> None:
    """Save adapter, tokenizer and arguments as Transformers' `save_model` does where nothing is sharded.

    The matrices are written by ourselves: PEFT 0.21 looks for the names of FSDP1's wrappers among them, finds none, and
    writes an empty file.

    Args:
        matrices: by their names in PEFT's files.
    """
    # First, as with an empty state dict PEFT writes a file without tensors, which the next line replaces.
    trainer._save(output_dir, state_dict={})
    save_file(matrices, Path(output_dir or trainer.args.output_dir) / "adapter_model.safetensors", {"format": "pt"})
