"""The Engine protocol, and the values that cross it.

An engine is one server at one URL. Differences between engines and their versions stay in the engine's own file or in
`Capabilities`, which is filled once at connect; no other code depends on which engine it has.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from trl_lora_sync.adapter.canonical import Form
from trl_lora_sync.adapter.store import NextVersion, StoredAdapter
from trl_lora_sync.adapter.support import PACKED_LAYERS
from trl_lora_sync.errors import DeadlineExceededError


@dataclass(frozen=True, kw_only=True)
class Deadline:
    """A point in time that all steps of one task share; on the monotonic clock, so it survives clock jumps.

    Not `asyncio.timeout_at`, which Python 3.10 lacks, and after which its error would not name the task.
    """

    ends_at: float
    budget_s: float
    task: str

    @classmethod
    def after(cls, seconds: float, task: str) -> "Deadline":
        return cls(ends_at=time.monotonic() + seconds, budget_s=seconds, task=task)

    def remaining_s(self) -> float:
        """Seconds left.

        Raises:
            DeadlineExceededError: none are.
        """
        left = self.left_s()
        if left <= 0:
            raise self.error()
        return left

    def left_s(self) -> float:
        """Seconds left, 0 if none are."""
        return max(0.0, self.ends_at - time.monotonic())

    def is_over(self) -> bool:
        return self.left_s() <= 0

    def error(self, message: str = "") -> DeadlineExceededError:
        """The error to raise once the time is up."""
        detail = f" ({message})" if message else ""
        return DeadlineExceededError(f"{self.task} did not finish within {self.budget_s:g} s{detail}.")


@dataclass(frozen=True, kw_only=True)
class Timeouts:
    """How long each step may take that has no setting, in seconds.

    Attributes:
        connect_s: for a connection to be made.
        connect_streams_s: for one to a port that a firewall may keep shut; a push over HTTP follows.
        retry_s: for short network failures. The fleet waits for longer outages, as it checks whether the server was
            restarted.
        watch_every_s: between two checks, while an answer is waited for, that the server is still alive.
        health_s: for one such check.
        cut_off_s: what a gateway waits for an answer at the least before it breaks the request off; 60 s is the
            default of nginx and of AWS's load balancers.
        lifeless_after_s: without a sign of life for so long, a server will not answer its open requests either.
        visibility_s: for a new directory to appear on a file system that is shared over a network (up to 30 s on FUSE
            mounts).
        probe_s: for probing an excluded server. A dead process refuses the connection immediately.
        abort_s: for aborting a request that was given up.
        abort_again_s: between two attempts at that.
        wait_for_abort_s: how long the caller of such a request waits for that, or for a load that cannot be aborted;
            an interrupt is to be over within two seconds.
        unload_s: for an unload beside the training; beyond this time it is stuck.
        unload_retry_s: for repeating an unload. A name that stays behind costs little, so a dead server may not hold
            up the end of a run by more.
        unstuck_s: for checking that an unload which was stuck has ended.
        undo_s: for undoing a failed release of the KV cache.
        idle_s: for a server to become idle after its last answer is out.
        close_s: for everything together at the end of a run, for deleting files, and for unloads that something else
            waits for.
    """

    connect_s: float = 10.0
    connect_streams_s: float = 2.0
    retry_s: float = 3.0
    cut_off_s: float = 5.0
    watch_every_s: float = 5.0
    health_s: float = 5.0
    # At least three failed checks in a row, at `watch_every_s` + `health_s` each: one late answer of a busy server
    # must not end its requests.
    lifeless_after_s: float = 30.0
    visibility_s: float = 35.0
    probe_s: float = 2.0
    abort_s: float = 10.0
    abort_again_s: float = 0.2
    # Below `runtime.GRACE_S`, for which a cancelled task is waited for.
    wait_for_abort_s: float = 1.2
    unload_s: float = 30.0
    unload_retry_s: float = 2.0
    unstuck_s: float = 1.0
    undo_s: float = 10.0
    idle_s: float = 5.0
    close_s: float = 5.0


TIMEOUTS = Timeouts()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What one server is, read once at connect.

    Attributes:
        engine: `"vllm"` or `"sglang"`.
        version: the engine's own version, such as `"0.31.0"`.
        base_model: the name requests use for the base model.
        base_root: the base that the server was started with (text to compare and show, never to open).
        max_model_len: longest prompt plus completion in tokens, if known.
        logprobs_mode: `"processed_logprobs"`, `"raw_logprobs"`, or `"unknown"`.
        dtype: the server's --dtype, such as `"bfloat16"`; None if the checkpoint decides it, or if it is unknown.
        lora_dtype: in which it keeps adapters, or merges them into its weights, if known.
        max_lora_rank: the largest rank it takes, if known.
        max_loras: how many adapters one batch of it can have, the base model not counted, if known.
        keeps_adapters_apart: whether an adapter can be loaded while requests run for another one.
        target_modules: the modules it can adapt; empty if unknown.
        requires_packed_modules: whether q/k/v and gate/up must come complete.
        supports_stacked_experts: whether all experts of a layer may come in one tensor, whatever the model.
        rejects_shape_mismatch: whether it refuses an adapter of other shapes instead of crashing.
        supports_tensor_load: whether an adapter can be sent in the load request, without a shared file system.
        supports_push: whether an adapter can be sent to a separate route first, without a shared file system.
        checks_payload: whether it refuses a version whose tensors differ from those on the trainer's device.
        gpus: the UUIDs of the GPUs that it sees, if it can read versions from a trainer's.
        is_fused: whether a loaded adapter is added to the weights, so that one at a time is served.
        replicas: among how many engines it shares requests out, and the samples of a prompt too; 0 if unknown.
        is_cpu_build: whether it is vLLM on a CPU, which computes requests for the base model with an adapter if both
            are in one batch; None if unknown.
    """

    engine: str
    version: str
    base_model: str
    base_root: str
    max_model_len: int | None
    logprobs_mode: str
    dtype: str | None = None
    lora_dtype: torch.dtype | None = None
    max_lora_rank: int | None = None
    max_loras: int | None = None
    keeps_adapters_apart: bool = True
    target_modules: frozenset[str] = frozenset()
    requires_packed_modules: bool = False
    supports_stacked_experts: bool = False
    rejects_shape_mismatch: bool = True
    supports_tensor_load: bool = False
    supports_push: bool = False
    checks_payload: bool = False
    gpus: tuple[str, ...] = ()
    is_fused: bool = False
    replicas: int = 1
    is_cpu_build: bool | None = False

    @property
    def form(self) -> Form:
        """In which it takes adapters."""
        return Form(
            packed_modules=self.requires_packed_modules,
            stacked_experts=self.supports_stacked_experts,
            dtype=self.lora_dtype,
        )

    def serves_module(self, module: str) -> bool:
        """Whether layers of this name, such as `q_proj`, can be adapted; true if unknown."""
        # SGLang may list the packed layer (`qkv_proj`) or `all` in the place of its parts.
        packed_in = {whole for whole, parts in PACKED_LAYERS.items() if module in parts}
        return not self.target_modules or not self.target_modules.isdisjoint({"all", module, *packed_in})


@dataclass(frozen=True, kw_only=True)
class PromptGroup:
    """One prompt and how many completions to sample for it.

    Attributes:
        prompt: token ids, sent as they are; or text, which the server tokenizes.
        count: number of completions, at least 1.
        images: PIL images whose tokens are in `prompt`, or `None`.
    """

    prompt: list[int] | str
    count: int
    images: list[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Every sampling field, always sent explicitly, so that no default of a server leaks in.

    Attributes:
        top_k: 0 switches it off.
        logprobs: `None` for none, 0 for the sampled token's, N for up to N+1 per token.
        regex: constrains the completion, or `None`.
        image_token_id: the placeholder token of images in a prompt, if the model takes images.
        extra: engine-specific fields, which win over the ones above.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    max_tokens: int
    logprobs: int | None
    regex: str | None = None
    image_token_id: int | None = None
    # They come from `generation_kwargs`, which override TRL's own fields (trl/trainer/grpo_config.py).
    extra: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def unrestricted(
        cls, *, max_tokens: int, logprobs: int | None, temperature: float = 1.0, **extra: Any
    ) -> "Sampling":
        """From the whole distribution, with nothing cut off and nothing penalised."""
        return cls(
            temperature=temperature,
            top_p=1.0,
            top_k=0,
            min_p=0.0,
            repetition_penalty=1.0,
            max_tokens=max_tokens,
            logprobs=logprobs,
            extra=extra,
        )


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One sampled completion.

    Attributes:
        prompt_ids: the prompt the server sampled from.
        token_ids: the completion, including the stop token if one was sampled.
        logprobs: per token, most probable first; the inner length is 1 for `logprobs=0` and at most N+1 otherwise.
        logprob_token_ids: the tokens that `logprobs` belong to, same shape.
        prompt_logprobs: of each token of the prompt after the first one; None unless requested.
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[list[float | None]] | None
    logprob_token_ids: list[list[int]] | None
    prompt_logprobs: list[float] | None = None


# How many requests one generation call has under way on a server.
CONCURRENT_REQUESTS = 64


class Engine(Protocol):
    """One server. Every method returns or raises by its deadline; all errors are `LoRASyncError`s."""

    base_url: str

    @property
    def capabilities(self) -> Capabilities:
        """What `connect` found."""

    @property
    def retries(self) -> int:
        """How many requests were sent again so far, because of a broken connection or files not yet visible."""

    async def connect(self, deadline: Deadline) -> Capabilities:
        """Wait until the server is up, and check what can be checked without an adapter.

        Raises:
            ServerUnreachableError: no answer came before the deadline.
            ServerAuthError: the server wants another API key.
            ServerSetupError: it was started in a way that adapter sync cannot work with.
        """

    async def has_token(self, token_id: int, deadline: Deadline) -> bool:
        """Whether `token_id` is in the vocabulary of the served base model."""

    async def score(self, model: str, prompt_ids: list[int], deadline: Deadline) -> list[float]:
        """Log-probability of each prompt token after the first, at temperature 1; errors as for `generate`."""

    async def score_image(
        self, model: str, prompt_ids: list[int], image: Any, image_token_id: int, scored: int, deadline: Deadline
    ) -> list[float]:
        """As `score`, of the last `scored` tokens of a prompt with an image.

        Raises:
            ServerSetupError: the engine takes no images, or applies no adapter to what sees them.
        """

    async def reserve(self, coming: NextVersion, deadline: Deadline) -> bool:
        """Have workers make room for the version that is loaded next, and whether they take it without a request.

        Errors as of `loaded`.
        """

    async def load(self, adapter: StoredAdapter, deadline: Deadline) -> dict[str, str]:
        """Make `adapter.name` selectable. Loading the same name and path again succeeds.

        Returns:
            What `loaded` would return now.

        Raises:
            AdapterRejectedError: the server refused it; it is not selectable.
            ServerSetupError: a server flag has to change first.
        """

    async def warm_up(self, adapter: StoredAdapter, deadline: Deadline) -> None:
        """Have the server put a loaded adapter to its first use, if that is where it can still go wrong.

        Raises:
            AdapterRejectedError: the server failed at it.
        """

    async def unload(self, adapter_name: str, deadline: Deadline) -> bool:
        """Unload a name. A missing one counts as unloaded; returns False instead of raising on any failure."""

    def take_over(self, before: "Engine") -> None:
        """Delete later what `before`, an earlier connection to the same server, has left to delete there."""

    async def loaded(self, deadline: Deadline) -> dict[str, str]:
        """The adapters the server would serve: name to path."""

    async def adapters_ran_at(self, deadline: Deadline) -> float | None:
        """When a request of any client for any adapter last ran: infinity for now, None if unknown.

        On the server's clock, so it can only be compared with another answer of this method.
        """

    async def ignored_fields(self, names: Collection[str], deadline: Deadline) -> list[str]:
        """Which of these fields of `Sampling.extra` the server would silently ignore; none if that cannot be known."""

    async def generate(
        self,
        model: str,
        groups: Sequence[PromptGroup],
        sampling: Sampling,
        deadline: Deadline,
        at_once: int = CONCURRENT_REQUESTS,
    ) -> list[list[Completion]]:
        """Sample `group.count` completions for each group from `model`, an adapter name or the base.

        The first error of a request, and cancellation, end all requests at once.

        Args:
            at_once: how many requests the groups are put into at most; more groups share one.

        Raises:
            AdapterLostError: the server does not know `model`.
            WrongPolicyError: a completion came from another model.
            GenerationError: the request failed, or the answer cannot be trained on.
            DeadlineExceededError: at the deadline, running requests are broken off.
        """

    async def chat(self, body: dict[str, Any], count: int, sampling: Sampling, deadline: Deadline) -> list[Completion]:
        """Sample `count` completions for an OpenAI chat request, as rollout functions send it; errors as `generate`."""

    async def pause(self, mode: str, deadline: Deadline) -> None:
        """Stop generation for all clients: `"drain"` lets running requests finish first, `"abort"` ends them.

        Raises:
            ServerSetupError: the server does not offer it.
        """

    async def resume(self, deadline: Deadline) -> None:
        """Undo `pause`; harmless without one."""

    async def release_kv_cache(self, deadline: Deadline) -> None:
        """Give back the memory of the KV cache; nothing can be sampled until `restore_kv_cache`.

        The base weights are never lost. Releasing twice does nothing more, and no client's request is interrupted.

        Raises:
            ServerSetupError: the server does not offer it.
            ServerError: requests did not end, or the release failed; nothing was released, unless its answer was lost.
        """

    async def restore_kv_cache(self, deadline: Deadline) -> bool:
        """Take the memory back; harmless without a release.

        Returns whether loaded adapters are still intact; if not, they must be loaded again.
        """

    async def close(self) -> None:
        """Release connections; never fails."""
