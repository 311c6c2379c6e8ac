"""The scheduler process of a fake SGLang: adapters in host memory, slots on the GPU, sampling, and what ends it.

Sources are paths below `sglang/`, read in 0.5.11, 0.5.15, 0.5.17 and 0.5.20 to 0.5.23; "INF" marks what was inferred.
"""

import base64
import io
import json
import math
import pickle
import re
import string
import uuid
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import regex
import torch
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from packaging.version import Version
from safetensors.torch import load_file

from trl_lora_sync.testing.policy import Array, ServedPolicy, Shapes, ToyPolicy, log_softmax

# srt/lora/utils.py `get_normalized_target_modules` (all)
_STACKED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_FUSED = {member: name for name, members in _STACKED.items() for member in members}
_EVERY_MODULE = frozenset({"qkv_proj", "o_proj", "gate_up_proj", "down_proj", "embed_tokens", "lm_head"})
TENSOR_PATH = "__tensor__"  # srt/managers/tokenizer_control_mixin.py `load_lora_adapter_from_tensors` (all)
_CHARACTERS = frozenset(string.printable)  # of texts that follow a grammar
GREEDY_BELOW = 1e-6  # srt/sampling/sampling_params.py `_SAMPLING_EPS` (all)
MEMORY_TAGS = ("kv_cache", "weights", "cuda_graph")  # srt/constants.py


class SchedulerDiedError(Exception):
    """The scheduler is gone, and the whole server with it (srt/managers/scheduler.py: SIGQUIT to the parent)."""


@dataclass(frozen=True, kw_only=True)
class ServerArgs:
    """How the server was started; names are SGLang's own, up to `shapes`.

    Attributes:
        shapes: of the base model.
        eos_token_id: ends a completion.
        image_token_id: stands for an image; None is a model of text. The policy does not look at images.
        seed: of the base model and of what is sampled.
        token_texts: the text of each token id; by default, ids below 256 are characters and others have none.
        policy: computes the logits; by default a `ToyPolicy` of the shapes and the seed.
    """

    version: str = "0.5.23"
    enable_lora: bool = True
    max_lora_rank: int = 16
    lora_target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    max_loras_per_batch: int = 8
    max_loaded_loras: int | None = None
    tp_size: int = 1
    dp_size: int = 1
    attn_dp_size: int = 1
    tokenizer_worker_num: int = 1  # only reported; a trainer refuses more
    api_key: str | None = None
    admin_api_key: str | None = None
    enable_memory_saver: bool = False
    enable_deterministic_inference: bool = False
    preferred_sampling_params: dict[str, Any] | None = None
    hicache_storage_backend: str | None = None
    enable_lmcache: bool = False
    speculative_algorithm: str | None = None  # only reported, as the next two
    speculative_accept_threshold_single: float = 1.0
    speculative_accept_threshold_acc: float = 1.0
    return_original_logprob: bool = False  # SGLANG_RETURN_ORIGINAL_LOGPROB=1
    model_path: str = "/models/tiny-qwen3"
    served_model_name: str | None = None
    context_length: int = 512
    dtype: str = "auto"
    shapes: Shapes = field(default_factory=Shapes)
    eos_token_id: int = 258
    image_token_id: int | None = None
    seed: int = 0
    token_texts: tuple[str, ...] | None = None
    policy: ServedPolicy | None = None

    def at_least(self, version: str) -> bool:
        return Version(self.version) >= Version(version)

    def base_policy(self) -> ServedPolicy:
        return self.policy or ToyPolicy(self.shapes, self.seed)

    def text_of(self, token_ids: list[int]) -> str:
        if self.token_texts is not None:
            return "".join(self.token_texts[token] for token in token_ids)
        return "".join(chr(token) for token in token_ids if token < 256)


@dataclass(frozen=True, kw_only=True)
class LoRARef:
    name: str
    path: str
    pinned: bool = False
    lora_id: str = field(default_factory=lambda: uuid.uuid4().hex)  # fresh per load: no stale KV cache


@dataclass
class Adapter:
    """One adapter in host memory, with q/k/v and gate/up stacked as SGLang does while loading."""

    ref: LoRARef
    config: dict[str, Any]
    weights: list[dict[str, torch.Tensor]]
    tensors: dict[str, torch.Tensor]
    patch: Any = None  # what the GPU computes with; made at the first batch

    @property
    def scaling(self) -> float:
        return float(self.config["lora_alpha"] / self.config["r"])  # srt/lora/lora.py: nothing else is read


class Scheduler:
    """Not thread-safe; the fake calls it under its own lock, except for `sample`."""

    def __init__(self, args: ServerArgs, die: Any) -> None:
        self.args = args
        self._die = die
        self.policy = args.base_policy()
        self.loras: dict[str, Adapter] = {}
        # srt/lora/lora_manager.py `init_memory_pool`: the base model takes a slot from the start
        self.slots: OrderedDict[str | None, bool] = OrderedDict({None: True})
        self.offloaded: set[str] = set()
        self.target_modules = _normalized(args.lora_target_modules)
        if "all" in self.target_modules:
            self.target_modules = _EVERY_MODULE

    # Loading: srt/lora/lora_manager.py `load_lora_adapter`, any exception becomes success=False (all)

    def load(self, ref: LoRARef) -> dict[str, Any]:
        def read() -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
            directory = Path(_local_or_hub(ref.path))
            config = json.loads((directory / "adapter_config.json").read_text())
            files = sorted(directory.glob("*.safetensors"))
            if not files:
                raise RuntimeError(f"Cannot find any model weights with `{directory}`")
            return config, {name: value for file in files for name, value in load_file(file).items()}

        return self._load(ref, read)

    def load_tensors(
        self, ref: LoRARef, payloads: list[Any], config: dict[str, Any], load_format: Any
    ) -> dict[str, Any]:
        """srt/managers/tp_worker.py: deserialised outside of any `try`, so every failure ends the scheduler (all)."""
        try:
            # Rank r reads element r; up to 0.5.16 there is one payload for all (`serialized_tensors`).
            ranks = self.args.tp_size if self.args.at_least("0.5.17") else len(payloads)
            read = [self._deserialise(payloads[rank]) for rank in range(ranks)]
            if load_format is not None:
                raise ValueError(f"the fake does not know load_format={load_format!r}")
        except Exception as error:
            self._die(f"{type(error).__name__} while deserialising tensors: {error}")
            raise SchedulerDiedError from error
        return self._load(ref, lambda: (config, read[0]))

    def _deserialise(self, payload: Any) -> dict[str, torch.Tensor]:
        # MultiprocessingSerializer.deserialize: base64 with validate=True, then SafeUnpickler
        data = base64.b64decode(payload, validate=True) if isinstance(payload, str) else payload
        return StrictUnpickler(io.BytesIO(data), self.args).load()  # type: ignore[no-any-return]

    def _load(self, ref: LoRARef, read: Any) -> dict[str, Any]:
        try:
            config, tensors = read()
            self._validate(ref, config)
            if config["peft_type"].lower() != "lora":  # srt/lora/lora.py `LoRAAdapter.__init__`
                raise AssertionError
            weights = self._stacked(tensors, config)
        except Exception as error:
            return self.result(False, str(error))
        self.loras[ref.lora_id] = Adapter(ref, config, weights, tensors)
        return self.result(True)

    def result(self, success: bool, message: str = "") -> dict[str, Any]:
        """srt/lora/lora_manager.py `create_lora_update_result` (all)."""
        listed = {adapter.ref.name: adapter.ref.path for adapter in self.loras.values()}
        return {"success": success, "error_message": message, "loaded_adapters": listed}

    def _validate(self, ref: LoRARef, config: dict[str, Any]) -> None:
        """srt/lora/lora_manager.py `validate_new_adapter`, srt/lora/mem_pool.py `can_support` (all); no shapes."""
        modules, rank = config["target_modules"], config["r"]
        # Read for the KeyError of a configuration without it (srt/lora/lora_config.py), which becomes a 400.
        config["lora_alpha"]
        if self.args.attn_dp_size > 1 and not ref.pinned:  # 0.5.21 and later
            raise AssertionError("DP-attention LoRA requires pinned adapters")
        if config.get("use_dora", False):
            raise ValueError(f"Failed to load {ref.name} because LoRA serving currently doesn't support DoRA adapters")
        if any(adapter.ref.name == ref.name for adapter in self.loras.values()):
            raise ValueError(f"Failed to load LoRA adapter {ref.name} because it is already loaded")
        wanted = _normalized(modules)
        if rank > self.args.max_lora_rank or not ("all" in wanted or wanted <= self.target_modules):
            raise ValueError(
                f"LoRA adapter {ref.name} with rank {rank} is incompatible with the current "
                "LoRA memory pool configuration. Please ensure that the LoRA adapter's rank is within the configured "
                "`--max-lora-rank` and that the target modules are included in `--lora-target-modules`."
            )

    def _stacked(self, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
        """srt/lora/lora.py `_process_weight`, `normalize_qkv_proj`, `normalize_gate_up_proj` (all)."""
        layers: list[dict[str, torch.Tensor]] = [{} for _ in range(self.args.shapes.layers)]
        declared = _normalized(config["target_modules"])
        for name, value in tensors.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            if layer:
                layers[int(layer[1])][name] = value  # IndexError for a layer that the base does not have
            elif ("embed_tokens" in name or "lm_head" in name) and not declared & {"all", "embed_tokens", "lm_head"}:
                continue  # skipped with a debug message
        for weights in layers:
            _stack_qkv(weights)
            _stack_gate_up(weights)
        return layers

    def unload(self, lora_id: str) -> dict[str, Any]:
        """srt/lora/lora_manager.py `unload_lora_adapter`: host copies go, and from 0.5.17 on the GPU slot."""
        if self.loras.pop(lora_id, None) is None and not self.args.at_least("0.5.21"):
            self._die("AssertionError: LoRA adapter is not loaded")  # outside of the `try` up to 0.5.20
            raise SchedulerDiedError
        if self.args.at_least("0.5.17"):  # `memory_pool.remove_lora`
            self.slots.pop(lora_id, None)
        return self.result(True)

    # The first batch: srt/lora/mem_pool.py `prepare_lora_batch` and `load_lora_weight_to_buffer` (all)

    def fetch(self, lora_id: str | None) -> Any:
        """Copy an adapter to a GPU slot unless it is there, and return what to compute with."""
        if lora_id not in self.slots:
            while len(self.slots) >= self.args.max_loras_per_batch:
                # The least recently used adapter, before the base model.
                self.slots.pop(next((key for key in self.slots if key is not None), None))
            if lora_id is not None:
                self._check_fits(self.loras[lora_id])
            self.slots[lora_id] = True
        self.slots.move_to_end(lora_id)
        if lora_id is None:
            return {}
        adapter = self.loras[lora_id]
        # Once for each load: a patch of a model is as large as its adapted weights.
        if adapter.patch is None:
            adapter.patch = self.policy.patch(self._as_served(adapter), adapter.scaling)
        return adapter.patch

    def _check_fits(self, adapter: Adapter) -> None:
        rank = adapter.config["r"]
        for weights in adapter.weights:
            for name, value in weights.items():
                # `gate_up_proj` contains `up_proj`, so the longest name counts, as in SGLang.
                module = max((m for m in self.target_modules if m in name), key=len, default=None)
                if module is None:  # srt/lora/utils.py `get_target_module_name`, which warns of a skip
                    self._die(f"ValueError: Cannot find target module name for {name} in {self.target_modules}")
                    raise SchedulerDiedError
                matrix = "A" if "lora_A" in name else "B"
                expected = self._buffer_shape(module, matrix, rank)
                if tuple(self._sliced(module, matrix, value).shape) != expected:
                    self._die(
                        f"AssertionError: LoRA buffer shape {expected} does not match weight shape "
                        f"{tuple(value.shape)}."
                    )
                    raise SchedulerDiedError

    def _buffer_shape(self, module: str, matrix: str, rank: int) -> tuple[int, int]:
        shapes = self.args.shapes
        members = _STACKED.get(module, (module,))
        if matrix == "A":
            return rank * len(members), shapes.of(members[0])[1]
        return sum(shapes.of(member)[0] for member in members), rank

    def _sliced(self, module: str, matrix: str, value: torch.Tensor) -> torch.Tensor:
        """srt/lora/layers.py `slice_lora_{a,b}_weights` for one rank: what is too large is cut off silently."""
        shapes = self.args.shapes
        if module in ("o_proj", "down_proj"):
            return value[:, : shapes.of(module)[1]] if matrix == "A" else value
        if matrix == "A":
            return value
        return value[: self._buffer_shape(module, "B", 1)[0]]

    def _as_served(self, adapter: Adapter) -> dict[str, torch.Tensor]:
        """The adapter after stacking and cutting; unchanged if it fits."""
        # Not of the stacked weights, as a policy computes each projection by itself.
        served, shapes = dict(adapter.tensors), self.args.shapes
        for name in list(served):
            module = next((m for m in ("q", "k", "v", "o", "gate", "up", "down") if f".{m}_proj." in name), None)
            if module is None or "layers." not in name:
                continue
            out, inside = shapes.of(f"{module}_proj")
            served[name] = served[name][:, :inside] if "lora_A" in name else served[name][:out]
        return served

    # Memory: srt/managers/scheduler_components/weight_updater.py (all; 0.5.11: scheduler_update_weights_mixin.py)

    def release_memory(self, tags: list[str], is_idle: bool) -> None:
        if not is_idle:
            self._die("AssertionError: release_memory_occupation should be called only when server is idle.")
            raise SchedulerDiedError
        if self.args.enable_memory_saver and self.offloaded & set(tags):  # INF: torch_memory_saver refuses it
            self._die("Cannot pause allocation that is not active.")
            raise SchedulerDiedError
        # Noted in any case, although without --enable-memory-saver nothing is freed.
        # Source: srt/utils/torch_memory_saver_adapter.py, 0.5.15.
        self.offloaded |= set(tags)

    def resume_memory(self, tags: list[str]) -> None:
        for tag in tags:
            if tag not in self.offloaded:  # `offload_tags.remove` of a set
                self._die(f"KeyError: {tag!r}")
                raise SchedulerDiedError
            self.offloaded.remove(tag)
            if tag == "weights" and self.args.enable_memory_saver:
                # Without --enable-weights-cpu-backup the memory comes back with nothing in it.
                self.policy = ToyPolicy(self.args.shapes, self.args.seed + 1)
                for adapter in self.loras.values():
                    adapter.patch = None

    def check_awake(self) -> None:
        if self.args.enable_memory_saver and self.offloaded:  # INF: unmapped memory is touched
            self._die("CUDA error: an illegal memory access was encountered")
            raise SchedulerDiedError


class Sampler:
    """One sample. Source: srt/layers/sampler.py, srt/sampling/sampling_batch_info.py (0.5.15 and 0.5.23).

    Args:
        patch: what the adapter adds to the policy.
        draw: how often this prompt was sampled before, so that samples differ.
    """

    def __init__(
        self,
        args: ServerArgs,
        policy: ServedPolicy,
        patch: Any,
        prompt: list[int],
        params: dict[str, Any],
        draw: int,
    ) -> None:
        self._args, self._policy, self._patch = args, policy, patch
        self.prompt, self.params = prompt, params
        self.output: list[int] = []
        self.logprobs: list[float] = []
        self.top: list[tuple[list[float], list[int]]] = []
        self.finish: dict[str, Any] | None = None
        self._context: Any = None
        for token in prompt:
            self._context = self._policy.step(self._context, token)
        seed = params["sampling_seed"]
        if self._args.enable_deterministic_inference:  # otherwise the seed is ignored
            # 42 is SGLang's seed of a request without one (srt/sampling/sampling_batch_info.py, 0.5.15).
            self._random = np.random.default_rng([42 if seed is None else seed, *prompt])
        else:
            self._random = np.random.default_rng([self._args.seed, draw, *prompt])
        self._grammar = None if params["regex"] is None else regex.compile(params["regex"])
        if params["max_new_tokens"] == 0:
            self.finish = {"type": "length", "length": 0}

    def input_logprobs(self, start: int) -> list[tuple[float | None, int, None]]:
        """srt/.../logprob_result_processor.py: from `start` on, None first; not scaled by the temperature."""
        rows = log_softmax(self._policy.logits(self._patch, self.prompt))
        values = [None, *(float(rows[i - 1, self.prompt[i]]) for i in range(start + 1, len(self.prompt)))]
        return [(value, token, None) for value, token in zip(values, self.prompt[start:], strict=False)]

    def advance(self, top: int) -> None:
        """Sample one more token, and finish if it was the last."""
        params = self.params
        assert self._context is not None
        raw = self._policy.logits_of(self._patch, self._context).astype(np.float64)
        logits = self._biased(raw)
        scaled = log_softmax(logits / params["temperature"])
        # Computed before truncation by top-k, top-p and min-p; those only restrict what is drawn.
        shown = log_softmax(raw) if self._args.return_original_logprob else scaled
        token = self._draw(np.exp(scaled))
        self.output.append(token)
        self.logprobs.append(float(shown[token]))
        best = np.argsort(-shown, kind="stable")[:top]
        self.top.append(([float(shown[i]) for i in best], [int(i) for i in best]))
        self._context = self._policy.step(self._context, token)
        self._end(token)

    def _biased(self, logits: Array) -> Array:
        """`apply_logits_bias`: penalties (of output tokens only), then the grammar's mask, then `logit_bias`."""
        logits, params = logits.copy(), self.params
        seen = sorted(set(self.output))
        if seen and params["repetition_penalty"] != 1.0:
            penalty, values = params["repetition_penalty"], logits[seen]
            logits[seen] = np.where(values > 0, values / penalty, values * penalty)
        for token in seen:
            logits[token] -= params["presence_penalty"] + params["frequency_penalty"] * self.output.count(token)
        if self._grammar is not None:
            logits[~self._allowed(self._grammar)] = -math.inf
        for token, bias in (params["logit_bias"] or {}).items():
            logits[int(token)] += bias
        return logits

    def _allowed(self, grammar: Any) -> Array:
        before = self._args.text_of(self.output)
        allowed = np.zeros(self._args.shapes.vocab, dtype=bool)
        for token in range(self._args.shapes.vocab):
            text = self._args.text_of([token])
            # A token without text would never bring the grammar nearer to its end. What `\S` is differs between `re`
            # and `regex` for control characters.
            if text and _CHARACTERS.issuperset(text):
                allowed[token] = grammar.fullmatch(before + text, partial=True) is not None
        allowed[self._args.eos_token_id] = grammar.fullmatch(before) is not None
        return allowed

    def _draw(self, probabilities: Array) -> int:
        params = self.params
        order = np.argsort(-probabilities, kind="stable")
        ranked = probabilities[order]
        keep = np.arange(len(ranked)) < params["top_k"]
        # By what comes before a token, so the token that reaches `top_p` is drawn from as well.
        keep &= np.cumsum(ranked) - ranked < params["top_p"]
        keep &= ranked >= params["min_p"] * ranked[0]
        keep[0] = True
        ranked = np.where(keep, ranked, 0.0)
        return int(order[self._random.choice(len(ranked), p=ranked / ranked.sum())])

    def _end(self, token: int) -> None:
        params = self.params
        # srt/managers/schedule_batch.py `_check_token_based_finish` (all): `ignore_eos` ignores `stop_token_ids`, too
        stops = set() if params["ignore_eos"] else {self._args.eos_token_id, *(params["stop_token_ids"] or ())}
        text = self._args.text_of(self.output)
        if token in stops:  # the matched token stays in output_ids; only `text` is trimmed
            self.finish = {"type": "stop", "matched": token}
        elif any(stop in text for stop in params["stop"]):
            self.finish = {"type": "stop", "matched": next(stop for stop in params["stop"] if stop in text)}
        elif len(self.output) >= params["max_new_tokens"]:
            self.finish = {"type": "length", "length": len(self.output)}


def sampling_params(given: dict[str, Any], args: ServerArgs) -> dict[str, Any]:
    """Defaults, then `verify` (srt/sampling/sampling_params.py, all).

    Raises:
        TypeError: an unknown field.
        ValueError: a value out of range, in SGLang's words.
    """
    defaults: dict[str, Any] = {
        "max_new_tokens": 128, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0,
        "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0, "min_new_tokens": 0, "n": 1,
        "ignore_eos": False, "skip_special_tokens": True, "spaces_between_special_tokens": True, "no_stop_trim": False,
    }  # fmt: skip
    optional = (
        "stop", "stop_token_ids", "stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "custom_params",
        "stream_interval", "logit_bias", "sampling_seed",
    )  # fmt: skip
    for name in given:
        if name not in defaults and name not in optional:
            raise TypeError(f"Unexpected keyword argument '{name}'")
    params: dict[str, Any] = dict.fromkeys(optional) | defaults
    # None means the default; only max_new_tokens may stay None, which is then bounded by the context.
    params |= {name: value for name, value in given.items() if value is not None}
    params["stop"] = [params["stop"]] if isinstance(params["stop"], str) else params["stop"] or []
    vocab = args.shapes.vocab
    # Before the checks, as SGLang makes these changes when it reads the request.
    if 0 <= params["temperature"] < GREEDY_BELOW:
        params |= {"temperature": 1.0, "top_k": 1}
    if params["top_k"] == -1:
        params["top_k"] = 1 << 30
    checks = [
        (math.isfinite(params["temperature"]) and params["temperature"] >= 0.0,
         f"temperature must be a non-negative finite number, got {params['temperature']}."),
        (0.0 < params["top_p"] <= 1.0, f"top_p must be in (0, 1], got {params['top_p']}."),
        (0.0 <= params["min_p"] <= 1.0, f"min_p must be in [0, 1], got {params['min_p']}."),
        (params["top_k"] >= 1, f"top_k must be -1 (disable) or at least 1, got {params['top_k']}."),
        (0.0 < params["repetition_penalty"] <= 2.0,
         f"repetition_penalty must be in (0, 2] (1.0 = no penalty), got {params['repetition_penalty']}."),
        (params["max_new_tokens"] >= 0, f"max_new_tokens must be at least 0, got {params['max_new_tokens']}."),
        (0 <= params["min_new_tokens"] <= params["max_new_tokens"],
         f"min_new_tokens must be in [0, max_new_tokens({params['max_new_tokens']})], got {params['min_new_tokens']}."),
        (sum(params[name] is not None for name in ("json_schema", "regex", "ebnf")) <= 1,
         "Only one of regex, json_schema, or ebnf can be set."),
    ]  # fmt: skip
    checks += [
        (0 <= int(token) < vocab, f"logit_bias must has keys in [0, {vocab - 1}], got {token}.")
        for token in params["logit_bias"] or {}
    ]
    for is_right, words in checks:
        if not is_right:
            raise ValueError(words)
    return params


class StrictUnpickler(pickle.Unpickler):
    """Admits what 0.5.21 and later admit, whatever the version, less what the version itself blocks.

    Source: srt/utils/common.py `SafeUnpickler`: module prefixes up to 0.5.20, exact names from 0.5.21 on, where
    `_load_from_bytes` may only give a storage.
    """

    _REBUILD = frozenset({"_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"})
    _BUILTINS = frozenset({"bool", "bytearray", "bytes", "dict", "float", "int", "list", "set", "str", "tuple"})

    def __init__(self, file: io.BytesIO, args: ServerArgs) -> None:
        super().__init__(file)
        self._args = args

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            # Torch pickles a storage as a second pickle in bytes, which would be read without any restriction.
            return _load_storage
        if self._is_admitted(module, name):
            return super().find_class(module, name)
        raise RuntimeError(f"Blocked unsafe global ({module}.{name}) during pickle deserialization")

    def _is_admitted(self, module: str, name: str) -> bool:
        if (module, name) == ("_codecs", "encode"):
            # Pickle writes bytes by it in protocols below 3.
            return self._args.at_least("0.5.21")
        if module == "torch":
            return (
                name in ("Size", "device", "Tensor")
                or isinstance(getattr(torch, name, None), torch.dtype)
                or (name.endswith("Storage") and hasattr(torch, name))
            )
        return (
            (module == "torch._utils" and name in self._REBUILD)
            or (module == "builtins" and name in self._BUILTINS)
            or (module, name) in {("collections", "OrderedDict"), ("torch.storage", "UntypedStorage"),
                                  ("torch.storage", "TypedStorage"), ("torch.serialization", "_get_layout")}
        )  # fmt: skip


def _load_storage(data: bytes) -> Any:
    storage = torch.load(io.BytesIO(data), weights_only=True)
    if not isinstance(storage, (torch.storage.TypedStorage, torch.UntypedStorage)):
        raise pickle.UnpicklingError(f"Expected a Torch storage, got {type(storage).__name__}")
    return storage


def _local_or_hub(path: str) -> str:
    """srt/lora/lora_config.py: what is not a directory is a hub repository to `snapshot_download` (all)."""
    if Path(path).is_dir():
        return path
    validate_repo_id(path)  # raises HFValidationError "Repo id must be in the form ..." for any absolute path
    raise FileNotFoundError(
        "An error happened while trying to locate the files on the Hub, and we cannot find the appropriate snapshot "
        "folder for the specified revision on the local disk. Please check your internet connection and try again."
    )


def _normalized(modules: Any) -> frozenset[str]:
    if isinstance(modules, str):
        if modules not in ("all", "all-linear"):
            raise ValueError("Only 'all' or 'all-linear' can be used as the string for target module")
        return frozenset({"all"})
    return frozenset(_FUSED.get(name.split(".")[-1], name.split(".")[-1]) for name in modules)


def _stack_qkv(weights: dict[str, torch.Tensor]) -> None:
    """q names the group: k may be missing, v may not (KeyError), and k or v without q stay as they are."""
    has_k = any(".k_proj." in name for name in weights)
    for q_name in [name for name in weights if ".q_proj." in name]:
        k_name, v_name = q_name.replace("q_proj", "k_proj"), q_name.replace("q_proj", "v_proj")
        k = weights[k_name] if has_k else torch.zeros_like(weights[v_name])
        weights[q_name.replace("q_proj", "qkv_proj")] = torch.cat((weights[q_name], k, weights[v_name]), 0)
        for name in (q_name, v_name, *((k_name,) if has_k else ())):
            weights.pop(name)


def _stack_gate_up(weights: dict[str, torch.Tensor]) -> None:
    """gate names the group: up may be missing; up without gate is left alone."""
    for gate_name in [name for name in weights if ".gate_proj." in name]:
        up = weights.pop(gate_name.replace("gate_proj", "up_proj"), None)
        gate = weights.pop(gate_name)
        up = torch.zeros_like(gate) if up is None else up
        weights[gate_name.replace("gate_proj", "gate_up_proj")] = torch.cat((gate, up), 0)
