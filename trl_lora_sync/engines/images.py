"""Images in prompts of token ids, as both engines need them. Does no I/O."""

import base64
import inspect
import io
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from trl_lora_sync.errors import GenerationError


def as_trained(image: Any) -> Any:
    """The colours of a PIL image that the trainer's processor computes with, and nothing else.

    Transformers ignores transparency (5.17) or puts white behind it (5.24), and it ignores the orientation in EXIF.
    vLLM puts white behind transparency, and in the trainer's process it turns images by EXIF (0.31).
    """
    import numpy
    from PIL import Image
    from transformers.image_transforms import convert_to_rgb

    # Without it, newer versions warn.
    options = {"return_numpy": True} if "return_numpy" in inspect.signature(convert_to_rgb).parameters else {}
    return Image.fromarray(numpy.asarray(convert_to_rgb(image, **options)))


def data_url(image: Any) -> str:
    """A PIL image as the data URL of its PNG."""
    buffer = io.BytesIO()
    # Without loss: the server must see the very pixels that the trainer's processor has seen.
    as_trained(image).save(buffer, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def data_urls(images: Sequence[Any]) -> list[str]:
    """`data_url` of each; for the thread for long calls, because making PNGs would hold up the loop."""
    return [data_url(image) for image in images]


def image_runs(prompt_ids: Sequence[int], image_token_id: int, images: int) -> list[tuple[int, int]]:
    """Where the tokens of each image begin in a prompt, and how many they are.

    Raises:
        GenerationError: the number of runs is not the number of images.
    """
    runs, start = [], 0
    for token, same in groupby(prompt_ids):
        length = sum(1 for _ in same)
        if token == image_token_id:
            runs.append((start, length))
        start += length
    if len(runs) != images:
        raise GenerationError(
            f"The prompt has {len(runs)} runs of image tokens but {images} images. "
            "It must have one run per image; check the chat template and the images of the dataset."
        )
    return runs


def one_token_per_image(prompt_ids: list[int], images: int, image_token_id: int | None) -> list[int]:
    """What SGLang, and vLLM in the trainer's process, replace by as many tokens as each image has.

    In a prompt that has them already, SGLang ends with HTTP 500 (0.5.15), and vLLM replaces the first one of each image
    once more (0.31).

    Raises:
        GenerationError: the prompt has not one run of image tokens for each image.
    """
    if not images:
        return prompt_ids
    if image_token_id is None:
        raise GenerationError("A prompt with images needs the model's image token, and the model names none.")
    sent, end = [], 0
    for start, length in image_runs(prompt_ids, image_token_id, images):
        sent += [*prompt_ids[end:start], image_token_id]
        end = start + length
    return sent + prompt_ids[end:]
