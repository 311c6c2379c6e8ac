"""Engines in this process, without sockets or processes: the contract of `Engine`, and nothing of a real engine's."""

import asyncio
import itertools
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.engines.base import (
    CONCURRENT_REQUESTS,
    Capabilities,
    Completion,
    Deadline,
    Engine,
    PromptGroup,
    Sampling,
)
from trl_lora_sync.engines.sglang.completions import read_completion
from trl_lora_sync.engines.sglang.completions import sampling_params as names_of
from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    GenerationError,
    LoRASyncError,
    ServerError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.runtime import in_parallel, offload
from trl_lora_sync.servers import handle
from trl_lora_sync.testing.policy import Shapes, log_softmax, read_adapter
from trl_lora_sync.testing.serving import server_args
from trl_lora_sync.testing.sglang import VERSIONS
from trl_lora_sync.testing.sglang_scheduler import Sampler, ServerArgs, sampling_params

_POLL_S = 0.005
_OF_A_LAYER = re.compile(r"layers\.\d+\.(?:.*\.)?(\w+)\.lora_([AB])\.")


@dataclass(frozen=True)
class _Loaded:
    path: str
    patch: Any  # what the policy computes with


class InMemoryEngine:
    """One server that is an object; see the `Engine` protocol for the methods.

    Loaded adapters are read from where the trainer wrote them, checked for their rank and shapes, and sampled from. A
    test changes what happens by the attributes.

    Args:
        args: how the server is started; only what concerns the model and adapters is looked at.
        base_url: what the trainer calls it. No connection is made to it.

    Attributes:
        calls: what was done, in order: the method and the name of the adapter or base model.
        errors: by the name of a method, the errors that its next calls raise instead of acting, one each.
        is_up: while False, every method raises ServerUnreachableError.
        token_delay_s: seconds that one token takes.
        is_asleep: whether the KV cache is released.
    """

    def __init__(self, args: ServerArgs | None = None, *, base_url: str = "http://127.0.0.1:1") -> None:
        self.args = args or ServerArgs()
        self.base_url = base_url
        self.retries = 0
        self.calls: list[tuple[str, str]] = []
        self.errors: defaultdict[str, list[LoRASyncError]] = defaultdict(list)
        self.is_up = True
        self.token_delay_s = 0.0
        self.is_asleep = False
        self._policy = self.args.base_policy()
        self._loaded: dict[str, _Loaded] = {}
        self._draws: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._is_paused = False
        self._running = 0
        self._aborts = 0

    def restart(self) -> None:
        """It is up, and nothing is loaded."""
        self.is_up, self.is_asleep, self._is_paused = True, False, False
        # A real engine keeps adapters in the memory of its process only.
        self._loaded.clear()

    @property
    def capabilities(self) -> Capabilities:
        """See `Engine`. SGLang is what it is called, as sampling fields have SGLang's names."""
        # Made at each use, as a test may change `args` while a run goes on.
        return Capabilities(
            engine="sglang",
            version=VERSIONS[-1],
            base_model=self.args.served_model_name or self.args.model_path,
            base_root=self.args.model_path,
            max_model_len=self.args.context_length,
            logprobs_mode="processed_logprobs",
            max_lora_rank=self.args.max_lora_rank,
            supports_tensor_load=True,
        )

    async def connect(self, deadline: Deadline) -> Capabilities:
        """See `Engine`."""
        self._begin("connect", self.args.model_path)
        return self.capabilities

    async def has_token(self, token_id: int, deadline: Deadline) -> bool:
        """See `Engine`."""
        self._begin("has_token", self.args.model_path)
        return 0 <= token_id < self.args.shapes.vocab

    def expected_logprobs(
        self,
        adapter: CanonicalAdapter | None,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        """What this engine must report for a completion; of the base for None."""
        tensors = None if adapter is None else adapter.tensors
        return self._policy.logprobs(tensors, 1.0, prompt_ids, completion_ids, temperature)

    async def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        """See `Engine`."""
        self._begin("score", model)
        rows = log_softmax(self._policy.logits(self._patch_of(model), prompt_ids))
        return [float(rows[place, token]) for place, token in enumerate(prompt_ids[1:])]

    async def score_image(
        self, model: str, prompt_ids: list[int], image: Any, image_token_id: int, scored: int, deadline: Deadline
    ) -> list[float]:
        """See `Engine`."""
        raise ServerSetupError("An engine in memory takes no images. Test with a vLLM server on the CPU.")

    # Adapters

    async def load(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        """See `Engine`."""
        self._begin("load", adapter.name)
        if adapter.rank > self.args.max_lora_rank:
            command = SGLANG.serve_command(self.args.model_path, ["--lora-rank", str(adapter.rank)])
            raise ServerSetupError(
                f"{self.base_url} was started with --max-lora-rank {self.args.max_lora_rank}, but the adapter has rank "
                f"{adapter.rank}. Start it with max_lora_rank={adapter.rank}; a real server with {command}."
            )
        path = adapter.server_path or "in memory"
        # By the contract of `Engine`: the same name and path again succeeds, and a name that has another path fails.
        known = self._loaded.get(adapter.name)
        if known is None:
            self._loaded[adapter.name] = _Loaded(path, await offload(partial(self._read, adapter)))
        elif known.path != path:
            raise AdapterRejectedError(
                f"{self.base_url} has loaded {adapter.name} from {known.path}, not from {path}. Every version needs "
                "a unique name."
            )
        return await self.loaded(deadline)

    def _read(self, adapter: StoredAdapter) -> Any:
        if adapter.content is not None:
            tensors, scaling = adapter.content.tensors, 1.0
        elif adapter.server_path is None:
            raise AdapterRejectedError(f"{adapter.name} has neither a path nor tensors.")
        elif not Path(adapter.server_path).is_dir():
            raise AdapterNotVisibleError(
                f"{self.base_url} cannot see {adapter.server_path}. It is read by this process; was it deleted?"
            )
        else:
            try:
                tensors, scaling = read_adapter(Path(adapter.server_path))
            # Whatever is wrong with the files, a server would answer with a refusal.
            except Exception as error:
                raise AdapterRejectedError(f"{self.base_url} cannot read {adapter.name}: {error}") from error
        wrong = [key for key, tensor in tensors.items() if not _fits(self.args.shapes, key, tuple(tensor.shape))]
        if wrong:
            raise AdapterRejectedError(
                f"{self.base_url} refuses {adapter.name}: {wrong[0]} has the shape {tuple(tensors[wrong[0]].shape)}, "
                "which does not fit the base model."
            )
        return self._policy.patch(tensors, scaling)

    async def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        """See `Engine`."""
        self._begin("warm_up", adapter.name)

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """See `Engine`."""
        return False

    async def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        """See `Engine`."""
        try:
            self._begin("unload", adapter_name)
        # By the contract of `Engine`, an unload returns False instead of raising.
        except LoRASyncError:
            return False
        self._loaded.pop(adapter_name, None)
        return True

    async def loaded(self, deadline: Deadline) -> dict[str, str]:
        """See `Engine`."""
        self._check_up()
        return {name: one.path for name, one in self._loaded.items()}

    async def ignored_fields(self, names: Collection[str], deadline: Deadline) -> list[str]:
        """See `Engine`."""
        return []

    async def adapters_ran_at(self, deadline: Deadline) -> float | None:
        """See `Engine`."""
        return None

    # Sampling

    async def generate(
        self,
        model: str,
        groups: Sequence[PromptGroup],
        sampling: Sampling,
        deadline: Deadline,
        at_once: int = CONCURRENT_REQUESTS,
    ) -> list[list[Completion]]:
        """See `Engine`."""
        self._begin("generate", model)
        # Once, so that an unload meanwhile takes nothing from samples that run.
        patch = self._patch_of(model)
        samples = [(group, sample) for group in groups for sample in range(group.count)]

        async def act(one: tuple[PromptGroup, int]) -> Completion:
            group, sample = one
            return await self._sample(model, patch, _token_ids(group), sampling, sample, deadline)

        completions = iter(await in_parallel(act, samples, at_once))
        return [list(itertools.islice(completions, group.count)) for group in groups]

    async def _sample(
        self, model: str, patch: Any, prompt: list[int], sampling: Sampling, sample: int, deadline: Deadline
    ) -> Completion:
        try:
            params = sampling_params(names_of(sampling, sample), self.args)
        except (TypeError, ValueError) as error:
            raise GenerationError(f"{self.base_url} refused the sampling fields: {error}") from error
        if len(prompt) + params["max_new_tokens"] > self.args.context_length:
            raise GenerationError(
                f"{self.base_url} takes {self.args.context_length} tokens, and {len(prompt)} of the prompt and "
                f"{params['max_new_tokens']} of the completion are more."
            )
        # As with SGLang, a request that comes during a pause waits for its end and does not fail.
        while self._is_paused:
            await self._next_turn(deadline, _POLL_S)
        if self.is_asleep:
            raise GenerationError(f"{self.base_url} has given back its KV cache.")
        key = (model, tuple(prompt))
        # Without it all samples of one prompt would be the same.
        self._draws[key] += 1
        sampler = Sampler(self.args, self._policy, patch, prompt, params, self._draws[key])
        # A count and not a flag, so that samples that begin after a pause go on.
        aborts = self._aborts
        self._running += 1
        try:
            while sampler.finish is None:
                sampler.advance(sampling.logprobs or 0)
                # Also without a delay, or samples would run one after the other and hold up the loop.
                await self._next_turn(deadline, self.token_delay_s)
                if self._aborts != aborts:
                    raise GenerationError(f"{self.base_url} aborted a sample, as for a pause.")
        finally:
            self._running -= 1
        pairs = zip(sampler.logprobs, sampler.output, strict=True)
        meta = {
            "prompt_tokens": len(prompt),
            "finish_reason": sampler.finish,
            "output_token_logprobs": [(value, token, None) for value, token in pairs],
            "output_top_logprobs": [list(zip(*one, strict=True)) for one in sampler.top],
        }
        # By the reader of SGLang's answers, so that samples pass the checks that a real server's do.
        return read_completion({"output_ids": sampler.output, "meta_info": meta}, prompt, sampling)

    async def _next_turn(self, deadline: Deadline, seconds: float) -> None:
        """Let others run; raises when the time is up, or the server is down."""
        await asyncio.sleep(min(seconds, deadline.remaining_s()))
        self._check_up()

    async def chat(self, body: dict[str, Any], count: int, sampling: Sampling, deadline: Deadline) -> list[Completion]:
        """See `Engine`."""
        raise GenerationError("An engine in memory has no chat template. Render it, and sample with token ids.")

    # Pausing and memory

    async def pause(self, mode: str, deadline: Deadline) -> None:
        """See `Engine`."""
        self._begin("pause", mode)
        self._is_paused = True
        self._aborts += mode == "abort"
        # Both modes end with no sample running: one lets them finish, and the other has just aborted them.
        while self._running:
            await self._next_turn(deadline, _POLL_S)

    async def resume(self, deadline: Deadline) -> None:
        """See `Engine`."""
        self._begin("resume", self.args.model_path)
        self._is_paused = False

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """See `Engine`."""
        self._begin("release_kv_cache", self.args.model_path)
        if self._running:
            raise ServerError(f"{self.base_url} did not become idle, so it keeps its KV cache.")
        self.is_asleep = True

    async def restore_kv_cache(self, deadline: Deadline) -> bool:
        """See `Engine`."""
        self._begin("restore_kv_cache", self.args.model_path)
        self.is_asleep = False
        return True

    def take_over(self, before: Engine) -> None:
        """See `Engine`."""

    async def close(self) -> None:
        """See `Engine`."""

    def _begin(self, method: str, name: str) -> None:
        """Note a call, and raise what a test wants it to."""
        self._check_up()
        self.calls.append((method, name))
        if self.errors[method]:
            raise self.errors[method].pop(0)

    def _check_up(self) -> None:
        if not self.is_up:
            raise ServerUnreachableError(f"No server answers at {self.base_url}.")

    def _patch_of(self, model: str) -> Any:
        if model == self.capabilities.base_model:
            return self._policy.patch(None, 1.0)
        if model not in self._loaded:
            raise AdapterLostError(f"{self.base_url} does not know {model!r}.")
        return self._loaded[model].patch


@contextmanager
def in_memory_engines(
    count: int = 1, model_path: str | Path | None = None, **args: Any
) -> Iterator[list[InMemoryEngine]]:
    """Engines that a run connects to while the block lasts, by their `base_url`.

    Args:
        count: how many servers there are.
        model_path: as for `serving_sglang`.
        args: fields of `ServerArgs` of each.
    """
    how = server_args(model_path, **args)
    # Ports that no server of a test has; nothing is sent there.
    engines = [InMemoryEngine(how, base_url=f"http://127.0.0.1:{1 + number}") for number in range(count)]
    by_url = {engine.base_url: engine for engine in engines}
    names = ("connect_engine", "wait_until_up", "reason_to_be_down")
    # Read before they are replaced. So a nested block passes on to the outer one what is not at its URLs.
    connect, wait, reason = (vars(handle)[name] for name in names)

    async def connect_engine(base_url: str, *, deadline: Deadline, **options: Any) -> Engine:
        if base_url not in by_url:
            other: Engine = await connect(base_url, deadline=deadline, **options)
            return other
        await wait_until_up(base_url, deadline=deadline)
        await by_url[base_url].connect(deadline)
        return by_url[base_url]

    async def wait_until_up(base_url: str, *, deadline: Deadline, **options: Any) -> None:
        if base_url not in by_url:
            await wait(base_url, deadline=deadline, **options)
            return
        while not by_url[base_url].is_up:
            if deadline.is_over():
                raise ServerUnreachableError(f"No server answers at {base_url}.")
            await asyncio.sleep(_POLL_S)

    async def reason_to_be_down(base_url: str, **options: Any) -> ServerUnreachableError | None:
        if base_url not in by_url:
            down: ServerUnreachableError | None = await reason(base_url, **options)
            return down
        return None if by_url[base_url].is_up else ServerUnreachableError(f"No server answers at {base_url}.")

    # In `servers.handle`, which looks these names up at each call.
    with mock.patch.multiple(
        handle,
        connect_engine=connect_engine,
        wait_until_up=wait_until_up,
        reason_to_be_down=reason_to_be_down,
    ):
        yield engines


def _token_ids(group: PromptGroup) -> list[int]:
    if group.images:
        raise GenerationError("An engine in memory takes no images. Test with a vLLM server on the CPU.")
    # One token for each byte, as the server of this folder reads a text.
    return list(group.prompt.encode()) if isinstance(group.prompt, str) else group.prompt


def _fits(shapes: Shapes, key: str, shape: tuple[int, ...]) -> bool:
    """Whether a matrix can be added to the module that its key names."""
    found = _OF_A_LAYER.search(key)
    if found is None:
        return False
    try:
        out, inside = shapes.of(found[1])
    except KeyError:
        return False
    return shape[1] == inside if found[2] == "A" else shape[0] == out
