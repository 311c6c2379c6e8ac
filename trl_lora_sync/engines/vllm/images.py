"""Image prompts on vLLM: rendered by the server first, then paired with the trainer's own token ids.

The server takes either token ids or images in one request, never both. So the images go through
`/v1/chat/completions/render` on their own, and the processed features it returns go with the token ids to
`/inference/v1/generate`. The features depend on the images alone; where they sit in the prompt is set here.

Source: the way TRL's own client does it (trl/generation/vllm_client.py, 1.11 and later).
"""

import uuid
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import httpx

from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.http import json_object, server_message
from trl_lora_sync.engines.images import data_urls, image_runs
from trl_lora_sync.engines.vllm.completions import sampling_fields
from trl_lora_sync.errors import GenerationError, ServerSetupError
from trl_lora_sync.runtime import offload

_RENDER = "/v1/chat/completions/render"
_GENERATE = "/inference/v1/generate"
# Without it, n > 1 returns only the sequences that finished last (vllm#52399).
_FINAL_ONLY = 2

Post = Callable[[str, dict[str, Any], Deadline], Awaitable[httpx.Response]]


async def request_for(
    post: Post, model: str, group: PromptGroup, sampling: Sampling, deadline: Deadline, *, restart: str
) -> tuple[str, dict[str, Any]]:
    """The route and body that sample from a prompt with images.

    Args:
        restart: the command that starts a server with these routes.

    Raises:
        ServerSetupError: the server does not offer the routes.
        GenerationError: the prompt has not one run of image tokens per image.
    """
    if isinstance(group.prompt, str) or sampling.image_token_id is None:
        raise GenerationError("A prompt with images needs token ids and the model's image token, and has neither.")
    features = await _render(post, model, group.images or [], deadline, restart)
    body = {
        "request_id": f"trl-lora-sync-{uuid.uuid4().hex}",
        "model": model,
        "token_ids": group.prompt,
        "return_token_ids": True,
        "features": place_images(features, group.prompt, sampling.image_token_id),
        "sampling_params": sampling_fields(sampling, group.count) | {"output_kind": _FINAL_ONLY},
    }
    return _GENERATE, body


async def _render(post: Post, model: str, images: list[Any], deadline: Deadline, restart: str) -> dict[str, Any]:
    urls = await offload(partial(data_urls, images))
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {"model": model, "messages": [{"role": "user", "content": content}], "max_tokens": 1}
    response = await post(_RENDER, body, deadline)
    # 403 since vLLM 0.32, whose words name the flag.
    if response.status_code in (403, 404):
        raise ServerSetupError(
            f"The vLLM server does not offer {_RENDER}, which image prompts need. From vLLM 0.31 on, restart it with "
            f"{restart}. The server answered: {server_message(response)!r}"
        )
    if response.status_code != 200:
        raise GenerationError(
            f"The vLLM server could not process the images of a prompt (HTTP {response.status_code}). Check that it "
            "serves the model that is being trained, and --limit-mm-per-prompt. "
            f"The server answered: {server_message(response)!r}"
        )
    features = json_object(response, GenerationError).get("features")
    if not isinstance(features, dict):
        raise GenerationError("The vLLM server processed the images of a prompt but returned no features for them.")
    return features


def place_images(features: dict[str, Any], prompt_ids: list[int], image_token_id: int) -> dict[str, Any]:
    """Point the features at the runs of image tokens in `prompt_ids`, one run per image.

    Raises:
        GenerationError: the number of runs is not the number of images.
    """
    # Their offsets are those in the rendered chat, which has other tokens around the images.
    images = len(features["mm_placeholders"]["image"])
    placeholders = [
        {"offset": offset, "length": length} for offset, length in image_runs(prompt_ids, image_token_id, images)
    ]
    return {**features, "mm_placeholders": {**features["mm_placeholders"], "image": placeholders}}
