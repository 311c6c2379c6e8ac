"""A fixed picture and a question about it, to score what modules that see images do to the words after it."""

import random
from typing import Any

from trl_lora_sync.checks.verify import ImageProbe
from trl_lora_sync.errors import UnsupportedSettingError

_SIDE, _SEED = 112, 20_013
_QUESTION = "What is in this picture? Describe it."
# Tokens of the question and of what follows it. Each of them costs one or two requests at the start.
_SCORED = 12


def make_image_probe(processing_class: Any, image_token_id: int | None) -> ImageProbe:
    """The probe as the processor of the trained model makes it.

    Raises:
        UnsupportedSettingError: it makes none.
    """
    from PIL import Image

    # Random pixels of a fixed seed: each start shows a server the same picture.
    image = Image.frombytes("RGB", (_SIDE, _SIDE), random.Random(_SEED).randbytes(3 * _SIDE * _SIDE))
    content = [{"type": "image", "image": image}, {"type": "text", "text": _QUESTION}]
    try:
        inputs = processing_class.apply_chat_template(
            [[{"role": "user", "content": content}]],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
        )
        prompt_ids = inputs["input_ids"][0].tolist()
        # Without a token of the image, `max` raises the ValueError that is caught below.
        after = len(prompt_ids) - 1 - max(index for index, token in enumerate(prompt_ids) if token == image_token_id)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise UnsupportedSettingError(
            "The adapter changes modules that see images, and the trainer's processing_class makes no prompt with an "
            f"image, which is needed to prove that the server applies them ({type(error).__name__}: {error}). Give the "
            "trainer the processor of the model, or train the language model only."
        ) from error
    assert image_token_id is not None
    return ImageProbe(
        prompt_ids=prompt_ids,
        image=image,
        image_token_id=image_token_id,
        # Words before the picture do not depend on it.
        scored=min(_SCORED, after),
        inputs=dict(inputs),
    )
