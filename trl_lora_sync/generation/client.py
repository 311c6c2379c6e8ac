"""The part of TRL's `VLLMClient` that trainers and rollout functions use, pointed at the active version.

`trainer.vllm_generation.vllm_client` on process 0. Communicator and weight-update methods have no meaning here.
"""

from collections.abc import Callable, Sequence
from typing import Any

from transformers.utils import get_json_schema

from trl_lora_sync.engines.base import Completion, PromptGroup, Sampling
from trl_lora_sync.engines.images import data_url
from trl_lora_sync.engines.vllm.completions import sampling_fields
from trl_lora_sync.errors import LoRASyncError
from trl_lora_sync.sync import AdapterSync


class RolloutClient:
    """Samples from the active adapter version with the call signatures of `trl.generation.vllm_client.VLLMClient`.

    One differs: the second parameter of `generate` is `images`, where TRL has `features`, which is what its own server
    makes of images (1.16).

    Args:
        sync: knows the servers and the active version.
        sync_if_changed: called before each request, so that none samples from an earlier policy than the trainer's.
    """

    def __init__(self, sync: AdapterSync, sync_if_changed: Callable[[], None]) -> None:
        self._sync = sync
        self._sync_if_changed = sync_if_changed

    @property
    def base_url(self) -> str:
        """The server's URL, or the URLs of all servers, joined by commas."""
        return self._sync.fleet.base_url

    @property
    def model(self) -> str:
        """The name of the active version.

        Raises:
            LoRASyncError: before the first sync.
        """
        if self._sync.active is None:
            raise LoRASyncError(
                "No adapter version is active yet. Generate after the trainer's first sync, for instance inside "
                "rollout_func, or call trainer.vllm_generation.sync_weights() on every process."
            )
        return self._sync.active.name

    def get_server_info(self) -> dict[str, Any]:
        """Read by `GRPOTrainer`: how the server computes log-probabilities."""
        mode = self._sync.fleet.capabilities.logprobs_mode
        # TRL warns of every mode but this one (trainer/grpo_trainer.py, 1.16), and an unknown one may well be right.
        return {"model_config": {"logprobs_mode": "processed_logprobs" if mode == "unknown" else mode}}

    def reset_prefix_cache(self) -> None:
        """Does nothing: no cache entry of one version fits another."""

    def generate(
        self,
        prompts: Sequence[str | list[int]],
        images: list[list[Any] | None] | None = None,
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        image_token_id: int | None = None,
    ) -> dict[str, Any]:
        """Sample `n` completions per prompt.

        Returns:
            `prompt_ids` with one entry per prompt, and `completion_ids`, `logprobs` and `logprob_token_ids` with `n`
            entries per prompt, prompt-major.
        """
        self._sync_if_changed()
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            logprobs=logprobs,
            regex=structured_outputs_regex,
            image_token_id=image_token_id,
            extra=generation_kwargs or {},
        )
        pictures = images or [None] * len(prompts)
        groups = [
            PromptGroup(prompt=prompt, count=n, images=image) for prompt, image in zip(prompts, pictures, strict=True)
        ]
        answers = self._sync.generate(self.model, groups, sampling, self._sync.generation_deadline())
        return _answer(answers, logprobs)

    def chat(
        self,
        messages: list[list[dict[str, Any]]],
        n: int = 1,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        max_tokens: int = 16,
        logprobs: int | None = 0,
        structured_outputs_regex: str | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        chat_template_kwargs: dict[str, Any] | None = None,
        tools: list[Any] | None = None,
        chat_template: str | None = None,
        max_concurrent_requests: int | None = None,
    ) -> dict[str, Any]:
        """Sample `n` completions per conversation; the server renders the chat template. Returns as `generate` does.

        Args:
            max_concurrent_requests: has no effect, as the fleet limits the requests to each server itself.
        """
        sampling = Sampling(
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            max_tokens=max_tokens,
            logprobs=logprobs,
            regex=structured_outputs_regex,
            extra=generation_kwargs or {},
        )
        self._sync_if_changed()
        # After the sync, which gives the active version another name.
        body = {
            "model": self.model,
            "stream": False,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
            **sampling_fields(sampling, n),
            # After `sampling_fields`, where `logprobs` is a number. This route takes a boolean, and the number apart.
            "logprobs": logprobs is not None,
            "top_logprobs": logprobs,
        }
        # The server refuses an empty list (TRL 1.16, generation/vllm_client.py).
        if tools:
            # The caller parses tool calls, so the server only has to render the tools into the prompt.
            body |= {"tools": [get_json_schema(t) if callable(t) else t for t in tools], "tool_choice": "none"}
        if chat_template is not None:
            body["chat_template"] = chat_template
        if chat_template_kwargs:
            body["chat_template_kwargs"] = chat_template_kwargs
        bodies = [{**body, "messages": openai_messages(conversation)} for conversation in messages]
        answers = self._sync.chat(bodies, n, sampling, self._sync.generation_deadline())
        return _answer(answers, logprobs)


def openai_messages(conversation: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """TRL's messages in OpenAI's form: images become data URLs, everything else stays."""
    return [
        {**message, "content": [_openai_part(part) for part in message["content"]]}
        if isinstance(message.get("content"), list)
        else message
        for message in conversation
    ]


def _openai_part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    # TRL's two forms of a picture (1.16, `to_openai_messages`).
    if kind in ("image", "image_pil"):
        return {"type": "image_url", "image_url": {"url": data_url(part[kind])}}
    return part


def _answer(answers: list[list[Completion]], logprobs: int | None) -> dict[str, Any]:
    rows = [completion for answer in answers for completion in answer]
    return {
        # Every sample of a prompt repeats the prompt.
        "prompt_ids": [answer[0].prompt_ids for answer in answers],
        "completion_ids": [row.token_ids for row in rows],
        "logprobs": None if logprobs is None else [row.logprobs for row in rows],
        "logprob_token_ids": None if logprobs is None else [row.logprob_token_ids for row in rows],
    }
