"""TRL's configuration with the fields of adapter sync, all checked together before a model is loaded."""

import inspect
import json
import math
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args, get_origin

import trl

from trl_lora_sync.addresses import default_sync_dir, has_secrets, is_http_url, is_local_url, is_same_server
from trl_lora_sync.errors import UnsupportedSettingError
from trl_lora_sync.trl_checks import refuse_mixin_last, refuse_others, refuse_without_mixin

if TYPE_CHECKING:
    from trl_lora_sync.settings import PolicySettings

# What a collective needs beyond the time that process 0 may take.
_COLLECTIVE_MARGIN_S = 60.0
# The fields of TRL's own that are read here, which every configuration of a trainer that samples on a server has.
_TRL_FIELDS = (
    "use_vllm", "vllm_mode", "vllm_server_base_url", "vllm_server_host", "vllm_server_port", "vllm_server_timeout",
)  # fmt: skip
# The active version, and the one before it.
_KEPT_FOR_OVERLAP = 2
# "colocate" from 1.11 to 1.16; read from TRL, so that messages about an unset mode stay true.
_TRL_VLLM_MODE = trl.GRPOConfig.vllm_mode
_T = TypeVar("_T")


def _with_fields_in_docstring(config: type[_T]) -> type[_T]:
    """Append the fields to the docstring in TRL's form, so that the help of a field is its only description."""
    lines = ["", "Args:"]
    for one in fields(config):  # type: ignore[arg-type]
        default = "" if one.default is None else f", defaults to `{json.dumps(one.default)}`"
        kind = "str" if one.default is None else type(one.default).__name__
        lines += [f"    {one.name} (`{kind}`, *optional*{default}):"]
        lines += textwrap.wrap(one.metadata["help"], 116, initial_indent=" " * 8, subsequent_indent=" " * 8)
    config.__doc__ = f"{inspect.cleandoc(config.__doc__ or '')}\n" + "\n".join(lines) + "\n"
    return config


@_with_fields_in_docstring
@dataclass
class LoRASyncConfig:
    r"""Mixin that adds the settings of adapter sync to a configuration of TRL.

    With `vllm_sync_strategy="weights"`, the default, the configuration is TRL's own in every respect. This package has
    no class for some trainers. Make one:

        @dataclass
        class MyGMPOConfig(LoRASyncConfig, GMPOConfig): ...

    `vllm_server_base_url` takes one URL, or several with commas in between; all of them then sample for the run.
    API keys are read from the environment, never from a field: `VLLM_API_KEY`, or `SGLANG_API_KEY` and
    `SGLANG_ADMIN_API_KEY`.
    """

    vllm_sync_strategy: Literal["weights", "lora_adapter"] = field(
        default="weights",
        metadata={
            "help": 'How the server gets the policy. `"weights"`: TRL merges the adapter and sends every weight over '
            'NCCL. `"lora_adapter"`: the trainer writes the LoRA adapter and the server loads it; the base weights '
            "never change. The latter needs `use_vllm=True` and a `LoraConfig`."
        },
    )
    vllm_server_engine: Literal["auto", "vllm", "sglang"] = field(
        default="auto",
        metadata={
            "help": 'Engine of the server: `"vllm"`, `"sglang"`, or `"auto"` to detect it. This setting and all below '
            'apply with `vllm_sync_strategy="lora_adapter"`.'
        },
    )
    vllm_server_sleep: Literal["off", "kv_cache"] = field(
        default="off",
        metadata={
            "help": "Memory that the server releases while the trainer computes the loss and its gradients: "
            '`"kv_cache"`, or `"off"` for none; never the base weights. For servers that share a GPU with the trainer. '
            "SGLang needs `--enable-memory-saver`; vLLM needs `--enable-sleep-mode` and `VLLM_SERVER_DEV_MODE=1`."
        },
    )
    vllm_colocate_base: Literal["auto", "own", "shared"] = field(
        default="auto",
        metadata={
            "help": 'Where vLLM has its base weights with `vllm_mode="colocate"`. `"own"`: in a second copy. '
            "`\"shared\"`: the trainer's frozen weights are views of vLLM's, after a comparison bit by bit, so the "
            'base is in GPU memory once. `"auto"`: `"shared"` on a CUDA GPU if both have the same 16-bit dtype, '
            "nothing is quantised or split over GPUs, and the bits agree; the start of a run prints which it is, and "
            "why."
        },
    )
    lora_sync_transport: Literal["auto", "disk", "push", "tensors"] = field(
        default="auto",
        metadata={
            "help": 'How an adapter reaches the server. `"disk"`: as files in a folder that both see. `"push"`: over '
            "HTTP into the memory of the server's host (vLLM with the `--middleware` of this package; SGLang takes "
            'tensors). `"tensors"`: in the load request itself (SGLang only). `"auto"`: `"disk"` on one host and where '
            "`lora_sync_server_dir` is set, else a way that the server offers."
        },
    )
    lora_sync_serving: Literal["runtime", "fused"] = field(
        default="runtime",
        metadata={
            "help": 'How the server applies an adapter. `"runtime"`: beside the base weights at each token. `"fused"`: '
            "merged into a copy of the served weights, so that tokens cost what the base model's cost; one version at "
            'a time. `"fused"` needs vLLM. A server is started with `trl-lora-sync serve vllm MODEL --fused`.'
        },
    )
    lora_sync_pause: Literal["off", "drain", "abort"] = field(
        default="off",
        metadata={
            "help": 'Whether generation of other clients stops during a load. `"drain"`: their requests finish first. '
            '`"abort"`: their requests are cancelled. `"off"`: it goes on, which is correct because each version has a '
            "new name."
        },
    )
    lora_sync_dir: str | None = field(
        default=None,
        metadata={
            "help": "Folder in which the trainer writes adapter versions for the server to read. Defaults to a folder "
            "in `/dev/shm` when every server is on this host, else to `_lora_sync` under `output_dir`, where "
            "`push_to_hub` leaves it out."
        },
    )
    lora_sync_server_dir: str | None = field(
        default=None,
        metadata={
            "help": "Absolute path of `lora_sync_dir` on the server. Needed if the server is on another host or in a "
            "container and shares the folder, even if the path is the same there."
        },
    )
    lora_sync_keep: int = field(
        default=2,
        metadata={
            "help": "Number of adapter versions that stay registered on the server, at least 1. Files are deleted one "
            "version later. If the adapter is on a GPU and written to `/dev/shm`, the trainer keeps "
            "`lora_sync_keep + 2` adapters there, and one on the GPU."
        },
    )
    lora_sync_timeout: float = field(
        default=120.0,
        metadata={
            "help": "Seconds that one adapter sync may take before it fails on every process, even if a file system "
            "hangs. A server may be away for as long."
        },
    )
    lora_sync_generation_timeout: float = field(
        default=1200.0,
        metadata={
            "help": "Seconds that the completions of one generation call may take before it fails on every process. "
            "Must stay below `ddp_timeout`, because the other processes wait."
        },
    )
    lora_sync_dtype: Literal["auto", "bfloat16", "float16", "float32"] = field(
        default="auto",
        metadata={
            "help": 'Dtype of the written adapter: `"bfloat16"`, `"float16"`, `"float32"` or `"auto"`. `"auto"` is the '
            "dtype in which the server uses adapters, if it is known: vLLM shows it with this package beside it. "
            "Otherwise the trainer's base weights decide."
        },
    )
    lora_sync_on_server_loss: Literal["error", "drop"] = field(
        default="error",
        metadata={
            "help": 'What happens if a server stays away for `lora_sync_timeout` seconds. `"error"`: the run ends. '
            '`"drop"`: the run goes on while at least one server is left, and readmits the lost one at a later sync. '
            "A server that returns earlier gets the active version again in either case."
        },
    )
    lora_sync_verify: Literal["first", "every", "off"] = field(
        default="first",
        metadata={
            "help": 'How to prove which adapter a server samples from. `"first"`: with random trial '
            "adapters of large effect, one for each group of modules (attention, MLP, ...), at the start and after "
            "each restart of a server, then with the first version; the "
            'server and the trainer score one short prompt. `"every"`: with each version as well. `"off"`: no proof. '
            'Except with `"off"`, the files of each version are compared bit by bit with what was written, once the '
            "servers have loaded them."
        },
    )
    lora_sync_verify_tolerance: float = field(
        default=3.0,
        metadata={
            "help": "How far the change by the adapter on a server may be from that in the trainer, in multiples of "
            "the distance between the two base models without any adapter. A fifth of the change and 0.001, for "
            "rounding, are tolerated besides."
        },
    )
    lora_sync_overlap: Literal[0, 1] = field(
        default=0,
        metadata={
            "help": "Number of batches that the servers sample ahead, `0` or `1`. With `1`, they sample each batch "
            "while the trainer works on the one before, so the policy it comes from is one generation batch older. "
            "For `GRPOTrainer`, and subclasses whose loss has the correction that "
            "`vllm_importance_sampling_correction=True` computes."
        },
    )

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_mixin_last(cls, LoRASyncConfig)

    def __post_init__(self) -> None:
        # TRL's first: it sets up the distributed state, which `world_size` is read from below.
        super().__post_init__()  # type: ignore[misc]
        for name in ("lora_sync_dir", "lora_sync_server_dir"):
            # A `Path` has no JSON, in which TensorBoard's callback logs all settings (Transformers 5.24).
            if isinstance(getattr(self, name), PurePath):
                setattr(self, name, str(getattr(self, name)))
        if syncs_adapters(self):
            check_sync_fields(self)
        elif self.lora_sync_overlap:
            raise UnsupportedSettingError(
                f'lora_sync_overlap={self.lora_sync_overlap} cannot be used with vllm_sync_strategy="weights": TRL '
                "replaces the weights that the servers sample from, so generation and training take turns. Set "
                'vllm_sync_strategy="lora_adapter", or lora_sync_overlap=0.'
            )

    def get_process_log_level(self) -> int:
        # Transformers' `Trainer.__init__` calls it (5.24), before TRL sets up its sync. A configuration is not
        # given its trainer, and a script may call this too, so the caller shows which it is.
        if syncs_adapters(self):
            caller = sys._getframe(1)
            while caller.f_back and caller.f_locals.get("self") is self:  # a subclass may override this
                caller = caller.f_back
            refuse_without_mixin(caller.f_locals.get("self"))
        return int(super().get_process_log_level())  # type: ignore[misc]


def syncs_adapters(args: Any) -> bool:
    """Whether a configuration, which may be TRL's own, chooses adapter sync.

    Raises:
        UnsupportedSettingError: it chooses something unknown.
    """
    strategy = getattr(args, "vllm_sync_strategy", "weights")
    check_choice("vllm_sync_strategy", strategy, _CHOICES["vllm_sync_strategy"])
    return bool(strategy == "lora_adapter")


def without_effect(args: Any) -> str | None:
    """A caution about our fields that are set in a configuration without adapter sync; None if none is."""
    given = [one for one in fields(LoRASyncConfig) if getattr(args, one.name, one.default) != one.default]
    if not given:
        return None
    seen = ", ".join(f"{one.name}={getattr(args, one.name)!r}" for one in given)
    return (
        f'{seen}: without effect, because vllm_sync_strategy="weights" is TRL\'s own sync. Set '
        'vllm_sync_strategy="lora_adapter" to sync adapters.'
    )


# Field -> the values that its annotation lists.
# Annotations are objects here and not text, as this module has no `from __future__ import annotations`.
_CHOICES = {one.name: get_args(one.type) for one in fields(LoRASyncConfig) if get_origin(one.type) is Literal}


@dataclass
class GRPOConfig(LoRASyncConfig, trl.GRPOConfig):  # type: ignore[misc]
    """TRL's `GRPOConfig` with the fields of `LoRASyncConfig`."""


@dataclass
class AsyncLoRASyncConfig(LoRASyncConfig):
    """Mixin that adds the settings of adapter sync to TRL's `AsyncGRPOConfig`, or a configuration that derives from it.

    What other configurations of TRL have as fields, an asynchronous one has one value of.
    """

    # Class variables do not become fields, so a command line does not offer them.
    use_vllm: ClassVar[bool] = True
    vllm_mode: ClassVar[str] = "server"
    vllm_server_host: ClassVar[None] = None
    vllm_server_port: ClassVar[None] = None


def check_sync_fields(args: Any) -> None:
    """Refuse settings that contradict adapter sync.

    Raises:
        UnsupportedSettingError: naming the field, the value seen and the one expected.
    """
    # Imported here: with "weights" a configuration loads nothing of the engines.
    from trl_lora_sync.engines.registry import ENGINES

    is_async = isinstance(args, AsyncLoRASyncConfig)
    # First, as TRL's other configurations lack fields that are read below, and their own reason is the better message.
    refuse_others(type(args), is_async=is_async)
    _check_fields(args)
    for name, choices in _CHOICES.items():
        check_choice(name, getattr(args, name), choices)
    if not args.use_vllm:
        raise _contradiction("use_vllm=False", "the adapter is loaded by vLLM or SGLang", "Set use_vllm=True")
    # TRL's own field, a plain string, so `_CHOICES` does not have it.
    check_choice("vllm_mode", args.vllm_mode, ("server", "colocate"))
    for name, kind in _NUMBERS.items():
        if hasattr(args, name):
            _check_number(name, getattr(args, name), kind)
    if args.vllm_mode == "colocate":
        _check_colocate(args)
    if args.lora_sync_keep < 1:
        raise _contradiction(
            f"lora_sync_keep={args.lora_sync_keep}", "at least the active version must stay", "Set it to 1 or more"
        )
    if not 0 < args.lora_sync_verify_tolerance < math.inf:
        raise UnsupportedSettingError(
            "lora_sync_verify_tolerance must be a positive, finite number, got "
            f'{args.lora_sync_verify_tolerance:g}. To verify nothing, set lora_sync_verify="off".'
        )
    spec = ENGINES.get(args.vllm_server_engine)
    if args.lora_sync_serving == "fused" and spec is not None and not spec.fused_engine:
        raise UnsupportedSettingError(
            f'lora_sync_serving="fused" cannot be used with vllm_server_engine="{spec.name}": {spec.versions.title} '
            'cannot add an adapter to its weights while it runs. Set lora_sync_serving="runtime", or sample on vLLM.'
        )
    if is_async:
        _check_async(args)
    elif args.lora_sync_overlap:
        _check_overlap(args)
    generation_kwargs = getattr(args, "generation_kwargs", None)
    _check_generation_kwargs(generation_kwargs)
    if args.vllm_mode == "colocate" and generation_kwargs:
        _check_seed(generation_kwargs, getattr(args, "num_generations", None) or 1)
    # Not in colocate mode, where a teacher may run at the default URL of a server that is not used.
    if args.vllm_mode == "server":
        _check_server(args)


def _check_server(args: Any) -> None:
    """Refuse times to wait for servers that do not fit, and a teacher that is one of them."""
    for name in ("lora_sync_timeout", "lora_sync_generation_timeout", "vllm_server_timeout"):
        _check_timeout(name, getattr(args, name), args)
    _check_start(args)
    # `DiskTransport` appends to the path, and vLLM takes a relative one for a repository of the Hub.
    if args.lora_sync_server_dir is not None and not str(args.lora_sync_server_dir).startswith("/"):
        raise UnsupportedSettingError(
            f"lora_sync_server_dir={args.lora_sync_server_dir!r} is not an absolute path. Give the path of "
            "lora_sync_dir on the server, such as /mnt/lora-sync, or leave it out."
        )
    if args.vllm_colocate_base == "shared":
        raise UnsupportedSettingError(
            'vllm_colocate_base="shared" cannot be used with vllm_mode="server": the server is another process. Set '
            'vllm_colocate_base="auto", or vllm_mode="colocate".'
        )
    _check_teacher(args, server_urls(args))


# Fields about servers, with the values that change nothing.
_SERVER_ONLY: dict[str, tuple[Any, ...]] = {
    "vllm_server_engine": ("auto", "vllm"),
    "lora_sync_transport": ("auto",),
    "lora_sync_pause": ("off",),
    "lora_sync_overlap": (0,),
}


def _check_colocate(args: Any) -> None:
    """Refuse what adapter sync cannot do with an engine in the trainer's process."""
    from trl_lora_sync.engines.vllm.spec import VLLM

    if args.vllm_server_sleep != "off":
        raise UnsupportedSettingError(
            f'vllm_server_sleep={args.vllm_server_sleep!r} is for vllm_mode="server". In colocate mode, give the KV '
            "cache back between generations with vllm_enable_sleep_mode=True."
        )
    for name, allowed in _SERVER_ONLY.items():
        value = getattr(args, name)
        if value not in allowed:
            default = " (TRL's default, which applies if it is not set)" if _TRL_VLLM_MODE == "colocate" else ""
            raise UnsupportedSettingError(
                f'{name}={value!r} cannot be used with vllm_mode="colocate"{default}: vLLM runs in the trainer\'s '
                f'process there. Set {name}={allowed[0]!r}, or set vllm_mode="server" and start a server with '
                f"{VLLM.serve_command('MODEL')}, where MODEL is the base model; for an adapter of a rank above 16, "
                "add --lora-rank."
            )
    # TRL refuses such a size as well, but only once the model is loaded (`VLLMGeneration._init_vllm`, 1.16).
    size, processes = args.vllm_tensor_parallel_size, args.world_size
    _check_number("vllm_tensor_parallel_size", size, Integral)
    if size < 1:
        raise UnsupportedSettingError(f"vllm_tensor_parallel_size must be 1 or more, got {size}.")
    if processes % size:
        raise UnsupportedSettingError(
            f'vllm_tensor_parallel_size={size} cannot be used with {processes} training process(es) and vllm_mode="'
            f'colocate": each engine runs in {size} of them, so the number of processes must be a multiple of it. '
            f"Start a multiple of {size} processes with accelerate launch --num_processes, or set "
            "vllm_tensor_parallel_size=1."
        )
    if size > 1 and args.vllm_colocate_base == "shared":
        raise UnsupportedSettingError(
            f'vllm_colocate_base="shared" cannot be used with vllm_tensor_parallel_size={size}: vLLM splits each '
            "weight over processes, and the trainer has it whole. Set vllm_tensor_parallel_size=1, or "
            'vllm_colocate_base="auto".'
        )


def _check_overlap(args: Any) -> None:
    """Refuse what sampling one batch ahead does not go together with."""
    off = "or set lora_sync_overlap=0"
    if not hasattr(args, "vllm_importance_sampling_correction"):
        raise _no_overlap(
            type(args).__name__,
            "its trainer does not correct for samples of an earlier policy. That correction exists for GRPO and its "
            "subclasses",
            "Set lora_sync_overlap=0",
        )
    if not args.vllm_importance_sampling_correction:
        raise _no_overlap(
            "vllm_importance_sampling_correction=False",
            "each batch is sampled from an earlier policy, and nothing else corrects for that",
            f"Set it to True, {off}",
        )
    if args.vllm_server_sleep != "off":
        raise _no_overlap(
            f"vllm_server_sleep={args.vllm_server_sleep!r}",
            "the servers sample while the trainer works, so they need their KV cache all the time",
            f'Set it to "off", {off}',
        )
    if args.lora_sync_pause == "abort":
        raise _no_overlap(
            'lora_sync_pause="abort"',
            "each load would end the requests of the batch that is sampled meanwhile",
            f'Set it to "off", {off}',
        )
    if args.lora_sync_keep < _KEPT_FOR_OVERLAP:
        raise _no_overlap(
            f"lora_sync_keep={args.lora_sync_keep}",
            "the version before the active one is sampled from as well",
            f"Set it to {_KEPT_FOR_OVERLAP} or more, {off}",
        )


# Fields that an asynchronous trainer leaves no choice of: the value, and why no other fits.
_ASYNC_FIELDS: dict[str, tuple[Any, str]] = {
    "lora_sync_overlap": (0, "it samples beside the training by itself, up to max_staleness versions ahead"),
    "lora_sync_serving": ("runtime", "a fused server has one version at a time, and samples come from several"),
    "lora_sync_pause": ("off", "the servers sample all the time, so a load would wait for requests or end them"),
    "vllm_server_sleep": ("off", "the servers sample while the trainer works, so they need their KV cache"),
}


def _check_async(args: Any) -> None:
    """Refuse what sampling beside the training does not go together with."""
    seen = f"with {type(args).__name__}"
    for name, (value, why) in _ASYNC_FIELDS.items():
        if getattr(args, name) != value:
            raise UnsupportedSettingError(
                f"{name}={getattr(args, name)!r} cannot be used {seen}: {why}. Set it to {value!r}."
            )
    if args.max_staleness < 0:
        raise UnsupportedSettingError(
            f"max_staleness={args.max_staleness} cannot be used {seen}: each sample would be too old to train on. Set "
            "it to 0 or more."
        )
    # `VersionLedger.lease` reads the active version in the thread of the rollouts. If one version were kept, the next
    # sync could retire it before its lease is noted.
    if args.lora_sync_keep < _KEPT_FOR_OVERLAP:
        raise UnsupportedSettingError(
            f"lora_sync_keep={args.lora_sync_keep} cannot be used {seen}: samples are begun while the next version is "
            f"loaded. Set it to {_KEPT_FOR_OVERLAP} or more; versions that are sampled from stay in any case."
        )


def check_async_arguments(given: dict[str, Any]) -> None:
    """Refuse arguments of an asynchronous trainer whose place adapter sync takes.

    Args:
        given: the trainer's arguments by name.

    Raises:
        UnsupportedSettingError: naming the argument.
    """
    for name, why in (
        ("rollout_worker", "it samples by its own requests, which name no version"),
        ("weight_transfer", "it would send the weights a second time"),
    ):
        if given.get(name) is not None:
            raise UnsupportedSettingError(
                f'{name} cannot be used with vllm_sync_strategy="lora_adapter": {why}. Leave it out, or set '
                'vllm_sync_strategy="weights".'
            )


def check_overlap_arguments(args: Any, given: dict[str, Any]) -> None:
    """Refuse arguments of a trainer that sampling one batch ahead does not go together with.

    Args:
        given: the trainer's arguments by name.

    Raises:
        UnsupportedSettingError: naming the argument.
    """
    for name, why in (
        ("rollout_func", "it samples by its own requests, and has no way to sample the next batch"),
        ("environment_factory", "the prompts of a batch depend on environments that are reset when it is sampled"),
    ):
        if given.get(name) is not None:
            raise _no_overlap(name, why, "Set lora_sync_overlap=0")
    if given.get("tools") and args.lora_sync_serving == "fused":
        raise _no_overlap(
            'tools with lora_sync_serving="fused"',
            "all turns of a batch are sampled from one version, and a fused server has the newest one only",
            'Set lora_sync_serving="runtime", or lora_sync_overlap=0',
        )


def _no_overlap(seen: str, why: str, fix: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(f"{seen} cannot be used with lora_sync_overlap=1: {why}. {fix}.")


def _check_fields(args: Any) -> None:
    missing = [name for name in _TRL_FIELDS if not hasattr(args, name)]
    if missing:
        raise UnsupportedSettingError(
            f'{type(args).__name__} cannot be used with vllm_sync_strategy="lora_adapter": it has no '
            f"{', '.join(missing)}, so its trainer does not sample on a server by TRL's means. Set "
            'vllm_sync_strategy="weights".'
        )


def _check_teacher(args: Any, urls: tuple[str, ...]) -> None:
    """Refuse a teacher on one of the servers, which would be the base model and not the policy that is trained.

    Source: `VLLMClient.model` is the first model that a server lists, TRL 1.16.
    """
    url = getattr(args, "teacher_model_server_url", None)
    # SDFT and SDPO have the switch alone, which takes the sampled server. `ServerDistillationConfig` has the URL alone,
    # and IW-OPD has both (1.16).
    if getattr(args, "use_teacher_server", url is not None) and (url is None or is_same_server(url, urls)):
        seen = "use_teacher_server=True" if url is None else f"teacher_model_server_url={url!r}"
        fix = "Set use_teacher_server=False" if url is None else "Serve the teacher from a server that is not sampled"
        raise _contradiction(
            seen, "TRL would sample from the server's base model there, without the adapter that is trained", fix
        )


# Fields that must be numbers in both modes. Dataclasses do not check this; a YAML file may have text in them.
_NUMBERS: dict[str, type[Any]] = {
    "lora_sync_keep": Integral,
    "lora_sync_timeout": Real,
    "lora_sync_generation_timeout": Real,
    "lora_sync_verify_tolerance": Real,
    # TRL's own, which some of its configurations have (1.16).
    "vllm_sync_frequency": Integral,
    "max_staleness": Integral,
}
_KINDS: dict[type[Any], str] = {Integral: "a whole number", Real: "a number"}


def _check_number(name: str, value: Any, kind: type[Any]) -> None:
    """Refuse a value of another type, such as the text of a number."""
    if isinstance(value, bool) or not isinstance(value, kind):
        raise UnsupportedSettingError(f"{name} must be {_KINDS[kind]}, got {value!r}.")


def _check_timeout(name: str, seconds: float, args: Any) -> None:
    _check_number(name, seconds, Real)
    # In this form it refuses NaN as well, with which neither comparison is true.
    if not 0 < seconds < math.inf:
        raise UnsupportedSettingError(f"{name} must be a positive, finite number of seconds, got {seconds:g}.")
    # A single process waits in no collective, so `ddp_timeout` does not end its waits.
    if args.world_size > 1 and seconds > args.ddp_timeout - _COLLECTIVE_MARGIN_S:
        raise UnsupportedSettingError(
            f"{name}={seconds:g} is too long for ddp_timeout={args.ddp_timeout}: the other processes wait inside a "
            f"collective, which needs {_COLLECTIVE_MARGIN_S:g} s more. Lower {name} or raise ddp_timeout."
        )


def _check_start(args: Any) -> None:
    """The start is one wait for the other processes: for the server, then for the base check and the trial load."""
    # Each round has a deadline of `lora_sync_timeout`: the adapter folder and the checks (`AdapterSync._prepare`).
    rounds = 2 if args.vllm_server_sleep == "off" else 4  # the KV cache is released and restored once as well
    seconds = args.vllm_server_timeout + rounds * args.lora_sync_timeout
    if args.world_size > 1 and seconds > args.ddp_timeout - _COLLECTIVE_MARGIN_S:
        raise UnsupportedSettingError(
            f"vllm_server_timeout={args.vllm_server_timeout:g} and {rounds} times lora_sync_timeout="
            f"{args.lora_sync_timeout:g} are too long for ddp_timeout={args.ddp_timeout}: the start may take their "
            f"sum, while the other processes wait inside a collective, which needs {_COLLECTIVE_MARGIN_S:g} s more. "
            "Lower one of the two or raise ddp_timeout."
        )


def _check_generation_kwargs(generation_kwargs: Any) -> None:
    from trl_lora_sync.engines.vllm.completions import RESERVED_FIELDS

    if not generation_kwargs:
        return
    if not isinstance(generation_kwargs, Mapping):
        raise UnsupportedSettingError(
            f"generation_kwargs must be a dictionary of sampling fields, such as {{'seed': 1}}, got "
            f"{generation_kwargs!r}."
        )
    # `generation_kwargs` are merged into a request last (`sampling_fields`), so any of these would win.
    reserved = sorted(RESERVED_FIELDS & generation_kwargs.keys())
    if reserved:
        raise _contradiction(
            f"generation_kwargs with {', '.join(map(repr, reserved))}",
            "these fields choose the policy and the shape of the answer, and are set for every request",
            "Remove them",
        )


def _check_seed(generation_kwargs: Mapping[str, Any], num_generations: int) -> None:
    """Refuse a seed in colocate mode, where TRL requests each completion of a group by itself (1.11 to 1.16)."""
    seed = generation_kwargs.get("seed")
    # vLLM takes -1 for none.
    if seed not in (None, -1) and num_generations > 1:
        raise UnsupportedSettingError(
            "generation_kwargs with 'seed' cannot be used with vllm_mode=\"colocate\": TRL sends a request for each of "
            f"the {num_generations} completions of a prompt, and with one seed all of them would be the same, so their "
            "advantages would be zero and nothing would be learned. Remove it."
        )


def check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Refuse a value that is not one of `choices`; dataclasses do not check `Literal` themselves."""
    if value not in choices:
        # A bare `off` or `no` in YAML is a boolean (1.1, which PyYAML reads).
        quotes = f" In a YAML file, put it in quotes: {name}: 'off'." if value is False and "off" in choices else ""
        raise UnsupportedSettingError(
            f"{name}={value!r} is not known. Choose one of {', '.join(map(repr, choices))}.{quotes}"
        )


def server_urls(args: Any) -> tuple[str, ...]:
    """The servers' base URLs from TRL's fields, without trailing slashes.

    Raises:
        UnsupportedSettingError: one is not an HTTP URL, is named twice, or carries a key.
    """
    if not isinstance(args.vllm_server_base_url, str | None):
        # Without its value, as a URL may carry a key.
        raise UnsupportedSettingError(
            f"vllm_server_base_url must be text, got a {type(args.vllm_server_base_url).__name__}. Write several URLs "
            "as one text with commas in between, such as 'http://gpu-1:8000,http://gpu-2:8000'."
        )
    text, setting = args.vllm_server_base_url, "vllm_server_base_url"
    if not text:
        text = f"http://{args.vllm_server_host}:{args.vllm_server_port}"
        setting = "http://{vllm_server_host}:{vllm_server_port}"
    if has_secrets(text):  # first of all, so that no other message shows a key
        raise UnsupportedSettingError(
            f"{setting} carries a user, password, query or fragment. URLs end up in logs and checkpoints. "
            "Give the plain URL, and the key in the environment variable VLLM_API_KEY or SGLANG_API_KEY."
        )
    urls = [url.strip() for url in text.split(",")]
    for url in urls:
        if not is_http_url(url):
            raise UnsupportedSettingError(
                f"{setting}={text!r}: {url!r} is not a URL. Expected something like http://localhost:8000, or several "
                "of these with commas in between. Set vllm_server_base_url to it."
            )
    # URLs for OpenAI's clients end so, and the routes here are appended to the server's root.
    plain = tuple(url.rstrip("/").removesuffix("/v1") for url in urls)
    twice = sorted({url for url in plain if plain.count(url) > 1})
    if twice:
        raise UnsupportedSettingError(
            f"vllm_server_base_url={text!r} names {', '.join(twice)} more than once. Every server is named once, "
            "however many GPUs it has. Remove the repetition."
        )
    return plain


def sync_settings(args: Any) -> "PolicySettings":
    """The trainer's arguments as the one object that is passed down."""
    import torch

    from trl_lora_sync.engines.registry import ENGINES
    from trl_lora_sync.engines.vllm.spec import VLLM
    from trl_lora_sync.settings import ColocateSettings, ServerAddress, SyncSettings

    # Only vLLM applies adapters to modules that see images, and only a proof shows whether a server does.
    # "auto" counts as vLLM: the engine is unknown before the connection, and the proof decides then.
    proves_groups = (
        args.vllm_mode == "server"
        and ENGINES.get(args.vllm_server_engine, VLLM).proves_groups
        and args.lora_sync_serving == "runtime"
        and args.lora_sync_verify != "off"
    )
    shared: dict[str, Any] = {
        "proves_groups": proves_groups,
        "dtype": None if args.lora_sync_dtype == "auto" else getattr(torch, args.lora_sync_dtype),
        "serving": args.lora_sync_serving,
        "verify": args.lora_sync_verify,
        "verify_tolerance": args.lora_sync_verify_tolerance,
        # A field of GOLD's and IW-OPD's configurations (1.16); the other trainers sync whenever the step has changed.
        "samples_older": getattr(args, "vllm_sync_frequency", 1) > 1,
    }
    if args.vllm_mode == "colocate":
        return ColocateSettings(**shared, base=args.vllm_colocate_base)
    is_async = isinstance(args, AsyncLoRASyncConfig)
    servers = tuple(ServerAddress(base_url=url, is_local=is_local_url(url)) for url in server_urls(args))
    # In this host's memory only if every server can see it.
    is_local = all(server.is_local for server in servers)
    return SyncSettings(
        servers=servers,
        engine=args.vllm_server_engine,
        transport=args.lora_sync_transport,
        root=Path(args.lora_sync_dir) if args.lora_sync_dir else default_sync_dir(is_local, args.output_dir),
        server_root=args.lora_sync_server_dir,
        keep=args.lora_sync_keep,
        pause=args.lora_sync_pause,
        frees_kv_cache=args.vllm_server_sleep == "kv_cache",
        sync_timeout_s=args.lora_sync_timeout,
        startup_timeout_s=args.vllm_server_timeout,
        generation_timeout_s=args.lora_sync_generation_timeout,
        on_server_loss=args.lora_sync_on_server_loss,
        overlap=args.lora_sync_overlap == 1,
        staleness=args.max_staleness if is_async else None,
        # Not every trainer of TRL has them.
        sampling_fields=tuple(getattr(args, "generation_kwargs", None) or ()),
        **shared,
    )


def check_reference(args: Any, peft_config: Any, model: Any = None) -> None:
    """Refuse a KL term or a teacher that would be computed with what an initialisation has left of the base.

    TRL computes the reference policy of a model that it has put an adapter on with the adapter disabled.
    Source: trl/trainer/grpo_trainer.py `_generate_and_score_completions`, 1.11 to 1.16; for a teacher
    trl/experimental/sdft/sdft_trainer.py `_setup_teacher_model`, and the same of SDPO, 1.16.

    Raises:
        UnsupportedSettingError: naming both settings.
    """
    from trl_lora_sync.adapter.support import changes_base

    # Of a model that comes with its adapter, TRL's reference is a copy, which `check_other_adapters` refuses.
    configs = [peft_config, *getattr(model, "peft_config", {}).values()]
    init, *others = (getattr(config, "init_lora_weights", None) for config in configs)
    # Other configurations have a `beta` of another meaning.
    if changes_base(init) and isinstance(args, trl.GRPOConfig | trl.RLOOConfig) and args.beta != 0:
        raise UnsupportedSettingError(
            f"beta={args.beta:g} cannot be used with LoraConfig(init_lora_weights={init!r}): TRL computes the "
            "reference policy with the adapter disabled, and without it the base lacks what the initialisation took "
            "out. Set beta=0, or init_lora_weights=True."
        )
    # Unlike a reference, a teacher is also made so of a model that comes with its adapter.
    init, kind = next(filter(changes_base, [init, *others]), None), getattr(args, "teacher_model_kind", "live")
    if init is not None and kind in ("base", "ema"):
        raise UnsupportedSettingError(
            f"teacher_model_kind={kind!r} cannot be used with LoraConfig(init_lora_weights={init!r}): TRL disables the "
            'adapter for the teacher ("base"), or adds another one, which changes the base again ("ema"), so the '
            'teacher\'s base lacks what the initialisation took out. Set teacher_model_kind="live", or '
            "init_lora_weights=True."
        )


def _contradiction(seen: str, why: str, fix: str) -> UnsupportedSettingError:
    from trl_lora_sync.adapter.support import WEIGHTS_WAY_OUT

    return UnsupportedSettingError(
        f'{seen} cannot be used with vllm_sync_strategy="lora_adapter": {why}. {fix}, {WEIGHTS_WAY_OUT}.'
    )
