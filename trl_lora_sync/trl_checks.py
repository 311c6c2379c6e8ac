"""What adapter sync relies on in TRL and Transformers, looked for in the versions that are installed.

A TRL that was never tested is used if all of it is there. Names and signatures are looked up when the package is
imported. What a trainer does with its generation object shows in its source alone, so that is read, before a model is
loaded; what only an instance shows is looked at once the trainer is built.
"""

import ast
import inspect
import logging
import re
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import transformers
import trl
from packaging.version import Version

from trl_lora_sync.errors import UnsupportedSettingError, UnsupportedTRLError
from trl_lora_sync.versions import TRL, TRL_ASYNC, KnownVersions, warn

logger = logging.getLogger(__name__)

GENERATION_MODULE, GENERATION_CLASS = "trl.generation.vllm_generation", "VLLMGeneration"
# What builds the engine in colocate mode; in the module of the generation class.
ENGINE_CLASS = "LLM"
# What loads a model by its path; in the modules of trainers.
LOADER = "create_model_from_path"
# Where a trainer keeps the step of its last sync.
LAST_SYNC_FIELDS = ("_last_loaded_step", "_last_vllm_sync_step")
_GENERATE_PARAMETERS = ("self", "prompts", "images", "num_generations", "profiler")
_GENERATION_METHODS = {"_init_vllm": ("self",), "sync_weights": ("self",), "generate": _GENERATE_PARAMETERS}
# `_trl.save_adapter` calls the first, and `LoRASyncTrainer.save_model` overrides the second.
_SAVING = {"_save": ("self", "output_dir", "state_dict"), "save_model": ("self", "output_dir", "_internal_call")}
_OF_TRANSFORMERS = f" of Transformers {transformers.__version__}"
# Token ids of prompts and of completions, the log-probabilities, and the token ids that these belong to.
_RETURNED_VALUES = 4
# What `VLLMGeneration.__init__` stores under the same name, for `LoRASyncGeneration` to read.
_STORED = frozenset(
    {
        "model", "accelerator", "processing_class", "mode", "structured_outputs_regex", "temperature", "top_p",
        "top_k", "min_p", "repetition_penalty", "max_completion_length", "logprobs", "generation_kwargs",
    }
)  # fmt: skip
# Of no meaning here: where the server is comes from our own settings, and the others are for colocate mode.
_IGNORED = frozenset(
    {
        "self", "server_base_url", "server_host", "server_port", "server_timeout", "group_port",
        "tensor_parallel_size", "gpu_memory_utilization", "max_model_length", "max_num_seqs", "enable_sleep_mode",
        "model_impl", "trust_remote_code",
    }
)  # fmt: skip
# What a trainer may use of its generation object; `llm` is there in colocate mode only.
_GENERATION_USES = frozenset({"sync_weights", "generate", "vllm_client", "llm"})
# All that `RolloutClient` has. A trainer that uses more would fail in the middle of a run.
_CLIENT_USES = frozenset({"get_server_info", "reset_prefix_cache", "generate", "chat", "base_url", "model"})
# The path to the only value that `RolloutClient.get_server_info` returns.
_SERVER_INFO_KEYS = ("model_config", "logprobs_mode")
# What source has: parts of the text of methods, or of the whole class.
Text = Mapping[str, Sequence[str]]
# In colocate mode `_trl.engine_class` replaces what the first calls, and the gate of `colocate.engine` meets what the
# second sends.
_COLOCATE_TEXT: Text = {
    "_init_vllm": (f"{ENGINE_CLASS}(",),
    "generate": ("self.llm.generate(",),
    "__init__": ("self.tensor_parallel_size = ",),
}
# With overlap: when GRPO's trainer samples, and what it counts by, and what it keeps.
# `_trl` computes the first two again. If TRL sampled at other steps, what is sampled ahead would not fit.
_OVERLAP_TEXT: Text = {
    "_prepare_inputs": (
        "generate_every = self.args.steps_per_generation * self.num_iterations",
        "if self._step % generate_every == 0 or self._buffered_inputs is None:",
    ),
    "": ("self._tokenize_prompts(prompts)", "inputs['importance_sampling_ratio']", "inputs['completion_mask']"),
}
_TAKING_PARAMETERS = ("self", "epoch_iterator", "num_batches", "device")
_PREPARING = {"_prepare_inputs": ("self", "generation_batch"), "_tokenize_prompts": ("self", "prompts")}
_STABLE = frozenset({"GRPOTrainer", "RLOOTrainer", "DistillationTrainer"})
# The beginnings of names of TRL's trainers and configurations, and why adapter sync is not for them.
_OTHERS = {
    "OnlineDPO": "it talks to the server through a separate client, and merges the adapter into what it sends",
    "AsyncGRPO": "it samples in the background through a separate client, and has another sync. Take AsyncGRPOConfig "
    "and AsyncGRPOTrainer, or the two mixins, from trl_lora_sync.async_grpo",
    "AsyncDistillation": "it samples in the background through a separate client, and loads adapters by itself",
}
_WEIGHTS = 'Set vllm_sync_strategy="weights"'
ASYNC_PACKAGE = "trl.experimental.async_grpo"
ASYNC_WORKER = "AsyncRolloutWorker"
_ASYNC_TRAINER_MODULE, _ASYNC_LOOP_MODULE = (
    f"{ASYNC_PACKAGE}.async_grpo_trainer",
    f"{ASYNC_PACKAGE}.async_rollout_worker",
)
# Of TRL's rollout loop: what is overridden, or called, with its parameters.
_ASYNC_LOOP = {
    "run": ("self",),
    "_run_loops": ("self", "stop_event"),
    "_generate_loop": ("self", "stop_event"),
    "_score_loop": ("self", "stop_event"),
    "_repeat_iterator": ("self",),
    "_generate_one": ("self", "prompt", "tool_dict", "tools", "group_id"),
    "_generate_one_turn": ("self", "prompt_ids"),
    "_score_group": ("self", "group"),
}
# By which each group has one version, and each of its samples is counted.
_ASYNC_LOOP_TEXT: Text = {
    "_generate_loop": (
        "group_id, row = next(work_iter)",
        "work_iter = self._repeat_iterator()",
        "model_version=self.model_version",
        "self._generate_one(prompt, tool_dict=tool_dict, tools=tools, group_id=group_id)",
    ),
    "_generate_one": (
        "turn_ids, turn_logprobs = await self._generate_one_turn(prompt_ids)",
        "return (completion, completion_ids, sequences, tool_call_count, tool_failure_count, None)",
    ),
    "_score_group": ("model_version=group.model_version",),
    "_score_loop": ("samples = await self._score_group(group)",),
    "_repeat_iterator": ("for _ in range(self.num_generations):", "yield (group_id, row)"),
    "run": ("self._run_loops(stop_event=self._stop_event)",),
}
# By which the trainer builds the worker, syncs and counts versions.
_ASYNC_TRAINER_TEXT: Text = {
    "": (
        f"self.rollout_worker = {ASYNC_WORKER}(",
        "StepIntervalCallback(self._sync_weight, self.args.weight_sync_steps)",
        "model_version_fn=lambda: self.model_version",
        "if self.args.token_budget is None:",
        "self._metrics = {",
    )
}
_ASYNC_STORED = frozenset(
    {
        "_loop", "_stop_event", "_counters", "num_generations", "temperature", "top_p", "top_k", "min_p",
        "repetition_penalty", "max_tokens",
    }
)  # fmt: skip
# What the loop is given beyond what the trainer passes to the worker.
_ASYNC_GIVEN = (
    "rollout_buffer", "model_version_value", "heartbeat_value", "failed_event", "exception_info_queue", "metrics_queue",
    "queue_maxsize", "dataset_start_index", "request_timeout", "processing_class",
)  # fmt: skip
_ASYNC_WORKER = {
    "start": ("self",),
    "stop": ("self",),
    "check_health": ("self", "stale_after_s"),
    "update_model_version": ("self", "model_version"),
}
# What a trainer may use of its worker, and of its client to the server before and while it trains with ours.
_ASYNC_WORKER_USES = frozenset(
    {"rollout_buffer", "metrics_queue", "check_health", "start", "stop", "update_model_version", "_loop_kwargs"}
)


def check_trl() -> None:
    """Look for what all trainers share.

    Raises:
        UnsupportedTRLError: what the installed TRL or Transformers has in another form, and which TRL was tested.
    """
    # First, as an old TRL lacks so much that its version is the better message.
    if TRL.is_too_old(trl.__version__):
        raise UnsupportedTRLError(
            f"TRL {trl.__version__} is installed, and adapter sync needs {TRL.oldest} or later. Install one with: "
            f"pip install 'trl>={TRL.oldest}'"
        )
    _raise_if_changed(
        [
            *_generation_changes(),
            *_function_changes("trl.models.utils", "remove_hooks", "add_hooks"),
            *_method_changes(transformers.Trainer, _SAVING, _OF_TRANSFORMERS),
            *_export_changes("GRPOConfig", "GRPOTrainer"),
        ]
    )
    # Last, as the caution claims that every check has passed.
    warn(logger, TRL.caution(trl.__version__))


def check_exports(*names: str) -> None:
    """Look for classes that are about to be derived from.

    Raises:
        UnsupportedTRLError: as for `check_trl`.
    """
    _raise_if_changed([*_export_changes(*names)])


def check_trainer(trainer_class: type) -> None:
    """Look for what adapter sync relies on in one trainer, before it is built.

    Raises:
        UnsupportedSettingError: adapter sync is not for such a trainer.
        UnsupportedTRLError: the installed TRL has something in another form.
    """
    refuse_others(trainer_class)
    classes = trl_classes(trainer_class)
    # Over all classes together, as a subclass such as GMPO's builds nothing itself (1.16).
    uses, changes = _Uses(), []
    for one in classes:
        tree = _class_tree(one)
        if tree is not None:
            uses.visit(tree)
        # A tested TRL is accepted without its source.
        elif TRL.doubt(trl.__version__):
            changes.append(f"the source of {one.__name__} cannot be read")
    names = [one.__name__ for one in classes if one.__name__ != "_BaseTrainer"]
    # A trainer in `_STABLE` is known to sample so; without the call there, TRL has changed.
    if not changes and not uses.builds_generation and not _STABLE & set(names):
        raise UnsupportedSettingError(
            f'{names[0]} cannot be used with vllm_sync_strategy="lora_adapter": it does not sample with '
            f"TRL's {GENERATION_CLASS}, whose place adapter sync takes. {_WEIGHTS}."
        )
    # Without any source there is nothing to compare. `check_built` looks at the instance in any case.
    if any(map(_class_tree, classes)):
        changes += uses.changes(names[0])
    changes += _signature_changes(trainer_class, names[0])
    _raise_if_changed(changes)


def check_colocate() -> None:
    """Look for what colocate mode relies on in TRL's generation class.

    Raises:
        UnsupportedTRLError: the installed TRL has something in another form.
    """
    module = import_module(GENERATION_MODULE)
    changes = [] if hasattr(module, ENGINE_CLASS) else [f"{GENERATION_MODULE} has no {ENGINE_CLASS}"]
    _raise_if_changed([*changes, *_text_changes(getattr(module, GENERATION_CLASS), _COLOCATE_TEXT)])


def check_overlap(trainer_class: type) -> None:
    """Look for what sampling one batch ahead relies on in a trainer.

    Raises:
        UnsupportedSettingError: it is not for such a trainer.
        UnsupportedTRLError: the installed TRL or Transformers has something in another form.
    """
    grpo = _trls_own_trainer()
    if not issubclass(trainer_class, grpo):
        raise UnsupportedSettingError(
            f"{trainer_class.__name__} cannot be used with lora_sync_overlap=1: it is for GRPOTrainer and its "
            "subclasses, which correct for samples of an earlier policy. Set lora_sync_overlap=0."
        )
    if not _corrects(trainer_class):
        raise UnsupportedSettingError(
            f"{trainer_class.__name__} cannot be used with lora_sync_overlap=1: its loss does not apply the correction "
            'for samples of an earlier policy, which is inputs["importance_sampling_ratio"]. Multiply by it there, '
            "or set lora_sync_overlap=0."
        )
    changes = [
        *_method_changes(transformers.Trainer, {"get_batch_samples": _TAKING_PARAMETERS}, _OF_TRANSFORMERS),
        *_method_changes(grpo, _PREPARING),
    ]
    _raise_if_changed(changes or [*_text_changes(grpo, _OVERLAP_TEXT)])


def _trls_own_trainer() -> Any:
    # Not `trl.GRPOTrainer`, which is the one of this package while its commands run (`_trl.script`).
    return import_module("trl.trainer.grpo_trainer").GRPOTrainer


def _corrects(trainer_class: type) -> bool:
    """Whether the loss of a subclass of GRPO's trainer is GRPO's, or has the importance sampling ratio."""
    classes = trainer_class.__mro__[: trainer_class.__mro__.index(_trls_own_trainer())]
    # Transformers calls `compute_loss`, and TRL's calls `_compute_loss` (1.11 to 1.16).
    for one in (one for one in classes if "compute_loss" in vars(one)):
        nodes = _nodes_reached(one, "compute_loss")
        if not _calls(nodes, "compute_loss", "_compute_loss"):
            return _has_ratio(nodes)
    for one in (one for one in classes if "_compute_loss" in vars(one)):
        nodes = _nodes_reached(one, "_compute_loss")
        # GMPO's loss has no ratio (1.16). The next class decides if its loss is called.
        if _has_ratio(nodes) or not _calls(nodes, "_compute_loss"):
            return _has_ratio(nodes)
    return True


def _calls(nodes: list[ast.AST], *methods: str) -> bool:
    return any(isinstance(node, ast.Attribute) and node.attr in methods for node in nodes)


def _has_ratio(nodes: list[ast.AST]) -> bool:
    return any(isinstance(node, ast.Constant) and node.value == "importance_sampling_ratio" for node in nodes)


def _nodes_reached(owner: type, method: str) -> list[ast.AST]:
    """The nodes of a method, and of all methods of the same class that these name."""
    nodes: list[ast.AST] = []
    left, seen = [method], set()
    while left:
        name = left.pop()
        if name not in seen and name in vars(owner):
            seen.add(name)
            tree = _function_tree(inspect.unwrap(vars(owner)[name]))
            found = list(ast.walk(tree)) if tree is not None else []
            nodes += found
            left += [node.attr for node in found if isinstance(node, ast.Attribute)]
    return nodes


def check_async_exports() -> ModuleType:
    """Look for TRL's asynchronous trainer, before it is derived from, and return the package that has it.

    Raises:
        UnsupportedTRLError: the installed TRL lacks it, or has it elsewhere, or imports what is not installed.
    """
    _raise_if_changed(
        [
            change
            for module, name in (
                (ASYNC_PACKAGE, "AsyncGRPOConfig"),
                (ASYNC_PACKAGE, "AsyncGRPOTrainer"),
                (_ASYNC_TRAINER_MODULE, ASYNC_WORKER),
                (_ASYNC_LOOP_MODULE, ASYNC_WORKER),
                (_ASYNC_LOOP_MODULE, "_AsyncRolloutLoop"),
            )
            for change in _async_class_changes(module, name)
        ],
        TRL_ASYNC,
    )
    return import_module(ASYNC_PACKAGE)


def check_async(trainer_class: type) -> None:
    """Look for what adapter sync relies on in an asynchronous trainer and its rollout loop.

    Raises:
        UnsupportedSettingError: it is another trainer.
        UnsupportedTRLError: the installed TRL has something in another form.
    """
    trls, module = import_module(ASYNC_PACKAGE).AsyncGRPOTrainer, import_module(_ASYNC_LOOP_MODULE)
    if not issubclass(trainer_class, trls):
        raise UnsupportedSettingError(
            f"{trainer_class.__name__} cannot be used with AsyncLoRASyncTrainer: it does not derive from TRL's "
            "AsyncGRPOTrainer. Use LoRASyncTrainer instead."
        )
    loop, worker = module._AsyncRolloutLoop, getattr(module, ASYNC_WORKER)
    changes = [*_signature_changes(trainer_class, trls.__name__)]
    for owner, methods in ((loop, _ASYNC_LOOP), (worker, _ASYNC_WORKER), (trls, {"_sync_weight": ("self",)})):
        changes += _method_changes(owner, methods)
    for owner, names in ((loop, _ASYNC_GIVEN), (trls, ("rollout_worker", "weight_transfer"))):
        missing = set(names) - set(inspect.signature(owner.__init__).parameters)
        changes += [f"{owner.__name__} takes no {', '.join(sorted(missing))}"] if missing else []
    # The text is read only if all methods are there, as a missing one has none.
    _raise_if_changed(
        changes
        or [
            *_text_changes(loop, _ASYNC_LOOP_TEXT),
            *_text_changes(trls, _ASYNC_TRAINER_TEXT),
            *_async_use_changes(loop, trls),
        ],
        TRL_ASYNC,
    )


def _async_use_changes(loop: type, trainer: type) -> Iterator[str]:
    """Whether the loop stores what is read of it, and the trainer uses no more of the worker than ours has."""
    if (tree := _function_tree(loop.__init__)) is not None:  # type: ignore[misc]
        for name in sorted(_ASYNC_STORED - {name for name, _ in _stored(tree)}):
            yield f"{loop.__name__} stores no {name}"
    nodes = ast.walk(tree) if (tree := _class_tree(trainer)) is not None else ()
    uses = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and _path(node.value) == "self.rollout_worker"
    }
    for used in sorted(uses - _ASYNC_WORKER_USES):
        yield f"{trainer.__name__} uses {used} of its {ASYNC_WORKER}"


def check_async_built(trainer: Any, worker_class: type) -> None:
    """Look at what only an instance shows.

    Raises:
        UnsupportedTRLError: the trainer has built another worker, or lacks something.
    """
    name = type(trainer).__name__
    changes = [*_instance_changes(trainer, "model_version", "rollout_worker")]
    # TRL builds the worker on process 0 alone (1.16).
    if trainer.accelerator.is_main_process and not isinstance(getattr(trainer, "rollout_worker", None), worker_class):
        changes.append(f"a {name} builds its {ASYNC_WORKER} in another way")
    _raise_if_changed(changes, TRL_ASYNC)


def refuse_others(found: type, *, is_async: bool = False) -> None:
    """Refuse TRL's trainers, or their configurations, that adapter sync is not for.

    Args:
        is_async: whether it has the mixin for AsyncGRPO's.

    Raises:
        UnsupportedSettingError: naming it, and why.
    """
    # Among the bases as well, so a user's subclass is found by what it derives from.
    for one in trl_classes(found):
        for beginning, why in _OTHERS.items():
            if one.__name__.startswith(beginning) and not (is_async and beginning == "AsyncGRPO"):
                raise UnsupportedSettingError(
                    f'{one.__name__} cannot be used with vllm_sync_strategy="lora_adapter": {why}. {_WEIGHTS}.'
                )


def check_arguments(generation_class: type, /, *args: Any, **kwargs: Any) -> None:
    """Refuse what a trainer requires of its generation object by a parameter that was not there when this was written.

    Args:
        generation_class: ours; its base is TRL's.
        *args, **kwargs: what the trainer passes.

    Raises:
        UnsupportedTRLError: one of these has another value than its default.
    """
    signature = inspect.signature(trl_classes(generation_class)[0].__init__)  # type: ignore[misc]
    given = signature.bind(None, *args, **kwargs).arguments
    _raise_if_changed(
        [
            f"the trainer passes {name}={value!r} to {GENERATION_CLASS}, which is not known here"
            for name, value in given.items()
            # A new parameter with its default changes nothing, so a newer TRL that has one can be used.
            if name not in _STORED | _IGNORED and value != signature.parameters[name].default
        ]
    )


def check_built(trainer: Any, generation_class: type) -> None:
    """Look at what only an instance shows.

    Raises:
        UnsupportedTRLError: the trainer has built another generation object, or lacks something.
    """
    name = type(trainer).__name__
    changes = [*_instance_changes(trainer)]
    if not isinstance(getattr(trainer, "vllm_generation", None), generation_class):
        changes.append(f"a {name} builds its generation object in another way")
    if not any(hasattr(trainer, one) for one in LAST_SYNC_FIELDS):
        changes.append(f"a {name} has none of {', '.join(LAST_SYNC_FIELDS)}")
    _raise_if_changed(changes)


def _instance_changes(trainer: Any, *more: str) -> Iterator[str]:
    """What a trainer lacks that is used of all of them, and `more`."""
    name = type(trainer).__name__
    for attribute in ("accelerator", "is_fsdp_enabled", *more):
        if not hasattr(trainer, attribute):
            yield f"a {name} has no {attribute}"
    if not {"train", "eval"} <= set(getattr(trainer, "_metrics", ())):
        yield f'the _metrics of a {name} have no "train" and "eval"'


def check_script(name: str) -> None:
    """Look for what is called of one of TRL's scripts.

    That these take the classes from `trl` when they are called shows then: TRL's own configuration has none of our
    flags, and `refuse_without_mixin` is for TRL's own trainer.

    Raises:
        UnsupportedTRLError: as for `check_trl`.
    """
    _raise_if_changed([*_function_changes(f"trl.scripts.{name}", "make_parser", "main", parameters=None)])


def check_launcher() -> None:
    """Look for what TRL's commands are launched with.

    Raises:
        UnsupportedTRLError: as for `check_trl`.
    """
    _raise_if_changed([*_function_changes("trl.cli.accelerate_config", "resolve_accelerate_config_argument")])


def refuse_mixin_last(found: type, mixin: type) -> None:
    """Refuse a class in which TRL's classes come before the mixin: they never call it, and it would be ignored.

    Raises:
        UnsupportedSettingError: with the order that is right.
    """
    classes, order = trl_classes(found), found.__mro__
    if classes and order.index(classes[-1]) < order.index(mixin):
        # `sorted` keeps the order of the others.
        bases = sorted(found.__bases__, key=lambda one: not issubclass(one, mixin))
        raise UnsupportedSettingError(
            f"{found.__name__} has {mixin.__name__} behind {classes[0].__name__}, which never calls it, so "
            "vllm_sync_strategy would be ignored. The mixin comes first: "
            f"class {found.__name__}({', '.join(one.__name__ for one in bases)})."
        )


def refuse_without_mixin(trainer: object) -> None:
    """Refuse a trainer of TRL without our mixin: it would sync merged weights, or load adapters without any check.

    Args:
        trainer: anything that is not such a trainer is left alone, as TRL's callbacks and configurations are.

    Raises:
        UnsupportedSettingError: with the trainer to take instead.
    """
    name, classes = type(trainer).__name__, trl_classes(type(trainer))
    # The mixin's class has that attribute, so it is there before any `__init__` has run.
    if not classes or not isinstance(trainer, transformers.Trainer) or hasattr(trainer, "_syncs_adapters"):
        return
    is_async = classes[0].__name__ == "AsyncGRPOTrainer"
    module = "trl_lora_sync.async_grpo" if is_async else "trl_lora_sync"
    mixin = "AsyncLoRASyncTrainer" if is_async else "LoRASyncTrainer"
    if type(trainer) is classes[0] and (is_async or name in _STABLE):
        instead = f"Import it from this package: from {module} import {name}"
    else:
        instead = f"Train with class Trainer({mixin}, {name}), after: from {module} import {mixin}"
    raise UnsupportedSettingError(
        f'vllm_sync_strategy="lora_adapter" was given to {name}, which does not read it and would sync in TRL\'s '
        f'way. {instead}. Or set vllm_sync_strategy="weights".'
    )


def trl_classes(found: type) -> list[type]:
    """TRL's own among a class and its bases, in the order of resolution."""
    return [one for one in found.__mro__ if one.__module__.partition(".")[0] == "trl"]


# What all trainers share


def _export_changes(*names: str) -> Iterator[str]:
    for name in names:
        try:
            # TRL imports a module when one of its names is first used, so only this shows what cannot be imported.
            getattr(trl, name)
        except (AttributeError, ImportError, RuntimeError) as error:  # RuntimeError: from Transformers' lazy modules
            yield f"trl has no {name} ({error})"


def _async_class_changes(module_name: str, name: str) -> Iterator[str]:
    try:
        found = getattr(import_module(module_name), name, None)
    except (ImportError, RuntimeError) as error:
        if isinstance(error, ModuleNotFoundError) and (missing := str(error.name).partition(".")[0]) != trl.__name__:
            # Such as aiohttp, which TRL imports there up to 1.14. Another TRL would not help.
            raise UnsupportedTRLError(
                f"TRL {trl.__version__} imports {missing} for its asynchronous trainer, and that is not installed. "
                f"Install it with: pip install {missing}"
            ) from error
        yield f"{module_name} cannot be imported ({error})"
        return
    if not isinstance(found, type):
        yield f"{module_name} has no class {name}"


def _generation_changes() -> Iterator[str]:
    try:
        module = import_module(GENERATION_MODULE)
    except ImportError as error:
        yield f"{GENERATION_MODULE} cannot be imported ({error})"
        return
    generation = getattr(module, GENERATION_CLASS, None)
    if not isinstance(generation, type):
        yield f"{GENERATION_MODULE} has no class {GENERATION_CLASS}"
        return
    yield from _method_changes(generation, _GENERATION_METHODS)
    missing = _STORED - set(inspect.signature(generation.__init__).parameters)  # type: ignore[misc]
    if missing:
        yield f"{GENERATION_CLASS} takes no {', '.join(sorted(missing))}"
        return
    yield from _init_changes(_function_tree(generation.__init__))  # type: ignore[misc]
    yield from _return_changes(_function_tree(getattr(generation, "generate", None)))


def _method_changes(owner: type, methods: Mapping[str, Sequence[str]], of: str = "") -> Iterator[str]:
    """Whether a class has methods with these parameters.

    Args:
        of: in which software, if not in TRL.
    """
    for method, expected in methods.items():
        function, what = getattr(owner, method, None), f"{owner.__name__}.{method}{of}"
        if not callable(function):
            yield f"there is no {what}"
            continue
        found = tuple(inspect.signature(function).parameters)
        for name in expected:
            if name not in found:
                yield f"{what} takes no {name}"
        # Also one with a default: our overriding method would not know what a caller requests by it.
        for name in found:
            if name not in expected:
                yield f"{what} takes another parameter, {name}"
        # Some of them are called with arguments by position, such as `get_batch_samples` by Transformers.
        if sorted(found) == sorted(expected) and found != tuple(expected):
            yield f"{what} takes its parameters in another order"


def _text_changes(owner: type, wanted: Text) -> Iterator[str]:
    """Whether methods of a class, and the class itself, have these parts of lines."""
    for method, lines in wanted.items():
        # TRL decorates some for profiling (1.11 to 1.16), and the source of the wrapper has none of these lines.
        tree = _function_tree(inspect.unwrap(getattr(owner, method))) if method else _class_tree(owner)
        text = _text_of(tree) if tree is not None else ""
        for line in lines:
            if text and line not in text:
                yield f"{owner.__name__}{method and f'.{method}'} has no {line}"


def _init_changes(tree: ast.AST | None) -> Iterator[str]:
    """Whether everything is stored by the time that `_init_vllm` is called."""
    if tree is None:
        return
    calls = [
        node.lineno for node in ast.walk(tree) if isinstance(node, ast.Call) and _path(node.func) == "self._init_vllm"
    ]
    if not calls:
        yield f"{GENERATION_CLASS}.__init__ does not call _init_vllm"
        return
    # By line, as `ast.walk` goes level by level and not in the order of the source.
    stored = {name for name, line in _stored(tree) if line < calls[0]}
    for name in sorted(_STORED - stored):
        yield f"{GENERATION_CLASS}.__init__ stores no {name} before it calls _init_vllm"


def _return_changes(tree: ast.AST | None) -> Iterator[str]:
    returned = [node.value for node in _own_nodes(tree) if isinstance(node, ast.Return)] if tree is not None else []
    if not all(isinstance(value, ast.Tuple) and len(value.elts) == _RETURNED_VALUES for value in returned):
        yield f"{GENERATION_CLASS}.generate returns something other than {_RETURNED_VALUES} values"


def _function_changes(module_name: str, *names: str, parameters: int | None = 1) -> Iterator[str]:
    """Whether a module has functions that take so many arguments; None for any number."""
    try:
        module = import_module(module_name)
    except ImportError as error:
        yield f"{module_name} cannot be imported ({error})"
        return
    for name in names:
        function = getattr(module, name, None)
        if not callable(function):
            yield f"{module_name} has no {name}"
        elif parameters not in (None, len(inspect.signature(function).parameters)):
            yield f"{module_name}.{name} takes other parameters"


# One trainer


@dataclass
class _Uses(ast.NodeVisitor):
    """What the methods of a trainer do with the generation object."""

    builds_generation: bool = False
    generation: set[str] = field(default_factory=set)
    client: set[str] = field(default_factory=set)
    keywords: set[str] = field(default_factory=set)
    other_forms: list[str] = field(default_factory=list)

    def visit_Call(self, node: ast.Call) -> None:
        path = _path(node.func)
        if path.rpartition(".")[2] == GENERATION_CLASS:
            self.builds_generation = True
        if path == "self.vllm_generation.generate":
            # The keyword of `**names` is None. It may pass anything, so it counts as an unknown name.
            self.keywords |= {keyword.arg or "**" for keyword in node.keywords}
            # `_GENERATE_PARAMETERS` includes `self`, so a call passes one fewer at most.
            if len(node.args) >= len(_GENERATE_PARAMETERS):
                self.other_forms.append("passes more arguments to generate")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if isinstance(node.value, ast.Call) and _path(node.value.func) == "self.vllm_generation.generate":
            for target in node.targets:
                if not (isinstance(target, ast.Tuple) and len(target.elts) == _RETURNED_VALUES):
                    self.other_forms.append(f"takes something other than {_RETURNED_VALUES} values from generate")
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        keys, inner = [node.slice], node.value
        while isinstance(inner, ast.Subscript):
            keys, inner = [inner.slice, *keys], inner.value
        if isinstance(inner, ast.Call) and _path(inner.func).endswith("vllm_client.get_server_info"):
            read = [key.value for key in keys if isinstance(key, ast.Constant)]
            if read != list(_SERVER_INFO_KEYS[: len(keys)]):
                self.other_forms.append(f"reads {'.'.join(map(str, read))} of what get_server_info returns")
            self.visit(inner)  # what is between has been looked at
        else:
            self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parent, _, name = _path(node).rpartition(".")
        if parent == "self.vllm_generation":
            self.generation.add(name)
        elif parent == "self.vllm_generation.vllm_client":
            self.client.add(name)
        self.generic_visit(node)

    def changes(self, trainer: str) -> Iterator[str]:
        if not self.builds_generation:
            yield f"{trainer} does not build a {GENERATION_CLASS}"
        for name in ("sync_weights", "generate"):
            if name not in self.generation:
                yield f"{trainer} does not call {name} of its generation object"
        for name in sorted(self.generation - _GENERATION_USES):
            yield f"{trainer} uses {name} of its generation object"
        for name in sorted(self.client - _CLIENT_USES):
            yield f"{trainer} uses {name} of its vLLM client"
        for name in sorted(self.keywords - set(_GENERATE_PARAMETERS)):
            yield f"{trainer} passes {name} to generate"
        for words in self.other_forms:
            yield f"{trainer} {words}"


def _signature_changes(trainer_class: type, name: str) -> Iterator[str]:
    """Whether the model, the arguments and the adapter can be found among what a trainer is given."""
    # Over all classes, as one may hand `**kwargs` on to its base, as GMPO's does (1.16).
    named = {
        parameter
        for one in trl_classes(trainer_class)
        if "__init__" in vars(one)
        for parameter in inspect.signature(one.__init__).parameters  # type: ignore[misc]
    }
    for parameter in ("model", "args", "peft_config"):
        if parameter not in named:
            yield f"{name} takes no {parameter}"


# Reading source


def _path(node: ast.AST) -> str:
    """A chain of attributes as in the source, `a.b.c`, or what of its end is one."""
    if isinstance(node, ast.Attribute):
        return f"{_path(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _stored(tree: ast.AST) -> Iterator[tuple[str, int]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _path(node.value) == "self":
            yield node.attr, node.lineno


def _own_nodes(module: ast.AST) -> Iterator[ast.AST]:
    """The nodes of the only function in `module`, without the nodes of functions inside it."""
    left = list(ast.iter_child_nodes(next(ast.iter_child_nodes(module))))
    while left:
        node = left.pop()
        yield node
        # What a function inside returns is not what the outer one returns.
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            left.extend(ast.iter_child_nodes(node))


def _text_of(tree: ast.AST) -> str:
    """Source in one form of quotes and line breaks, so the original may be formatted in another way."""
    text = ast.unparse(tree).replace("lambda :", "lambda:")
    # Python 3.10 puts brackets around the names on the left of an assignment, and 3.11 does not.
    return re.sub(r"^( *)\(([\w, ]+)\) = ", r"\1\2 = ", text, flags=re.MULTILINE)


def _function_tree(function: Any) -> ast.AST | None:
    """None if the source cannot be read."""
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(function)))
    # OSError: there is no source. TypeError: it is not written in Python. SyntaxError: a string in it reaches column 0,
    # so nothing is dedented.
    except (OSError, TypeError, SyntaxError):
        return None


def _class_tree(found: type) -> ast.AST | None:
    """None if the source cannot be read."""
    tree = _module_tree(found.__module__)
    nodes = ast.walk(tree) if tree is not None else ()
    return next((node for node in nodes if isinstance(node, ast.ClassDef) and node.name == found.__name__), None)


# A trainer's module has up to 3,400 lines (1.16), and several checks read it.
@cache
def _module_tree(name: str) -> ast.AST | None:
    return _function_tree(sys.modules[name])


# Errors


def _raise_if_changed(changes: Sequence[str], known: KnownVersions = TRL) -> None:
    if changes:
        # All patches of the newest tested version are accepted.
        newest = Version(f"{known.newest.major}.{known.newest.minor + 1}")
        raise UnsupportedTRLError(
            f"TRL {trl.__version__} is installed, which adapter sync cannot use: {'; '.join(changes)}. "
            f"Tested with TRL {known.tested}. Install one of these with: pip install 'trl>={known.oldest},<{newest}'"
        )
