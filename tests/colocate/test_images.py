"""Prompts with images in colocate mode: vLLM samples after the trainer's tokens and pictures, or there is an error.

The tests of a family share a trainer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from support.colocate import EXACT, OTHER_POLICY, colocate_trainer
from support.models import lora, randomize_adapter
from support.vision import LANGUAGE_MODEL, completion_logps, make_vision_model, odd_pictures, picture, tokenized
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_lora_sync.engines.images import data_url
from trl_lora_sync.errors import GenerationError

Row = tuple[dict[str, torch.Tensor], list[int], torch.Tensor]
# Mean distance to the log-probabilities with another picture; measured 0.25 and more.
OTHER_PICTURE = 0.05
ODD = odd_pictures()


def image_trainer(shape: str, folder: Path) -> Any:
    trainer = colocate_trainer(
        make_vision_model(folder / shape, shape),
        folder,
        vllm_max_model_length=256,
        generation_kwargs={"ignore_eos": True},
        trainer_kwargs={"peft_config": lora(**LANGUAGE_MODEL), "eval_dataset": None},
    )
    trainer.model.eval()
    randomize_adapter(trainer.model, seed=1)
    # This seed samples no image token, which without it would have to be ruled out and change all log-probabilities.
    # Set after the start, which refuses a seed for several completions of one prompt; here each prompt has one.
    trainer.vllm_generation.generation_kwargs["seed"] = 0
    return trainer


@pytest.fixture(scope="module", params=["qwen2.5-vl", "qwen3-vl"])
def trainer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trainer = image_trainer(request.param, tmp_path_factory.mktemp("images"))
    yield trainer
    trainer.vllm_generation.close()


def sampled(trainer: Any, pictures: list[Image.Image | None]) -> list[Row]:
    """One completion for each picture, with vLLM's log-probabilities of its tokens."""
    inputs = [tokenized(trainer.processing_class, one, "what is it?") for one in pictures]
    asked = [one["input_ids"][0].tolist() for one in inputs]
    images = [one and [one] for one in pictures]
    prompts, completions, logprobs, _ = trainer.vllm_generation.generate(asked, images, num_generations=1)
    assert prompts == asked
    served = [torch.tensor([token[0] for token in row]) for row in logprobs]
    return list(zip(inputs, completions, served, strict=True))


def gaps(trainer: Any, rows: list[Row]) -> torch.Tensor:
    """Mean distance of each row to the trainer's log-probabilities."""
    return torch.stack([(completion_logps(trainer.model, one, ids) - served).abs().mean() for one, ids, served in rows])


def test_vllm_samples_after_the_trainers_prompt_with_and_without_an_image(trainer: Any) -> None:
    """vLLM put the tokens of each image into a prompt that had them already: a gap of 0.4 to 0.5 in training."""
    rows = sampled(trainer, [picture(1), None, picture(2)])
    assert gaps(trainer, rows).max() < EXACT
    with trainer.model.disable_adapter():
        assert gaps(trainer, rows).min() > OTHER_POLICY
    (first, *answer), _, (second, *_) = rows
    assert gaps(trainer, [({**first, "pixel_values": second["pixel_values"]}, *answer)]).min() > OTHER_PICTURE


def test_vllm_sees_the_pixels_that_the_trainers_processor_sees(trainer: Any) -> None:
    """vLLM put white behind transparent pixels, and turned by EXIF what the trainer did not."""
    for what, image in ODD.items():
        assert gaps(trainer, sampled(trainer, [image])).max() < EXACT, what


@pytest.mark.parametrize("image", ODD.values(), ids=ODD)
def test_a_server_of_vllm_sees_the_pixels_that_the_trainers_processor_sees(image: Image.Image) -> None:
    from vllm.multimodal.media.image import ImageMediaIO

    received = ImageMediaIO().load_base64("image/png", data_url(image).partition(",")[2]).media
    processor = Qwen2VLImageProcessorPil()
    served, trained = (processor(images=[one], return_tensors="pt")["pixel_values"] for one in (received, image))
    assert served.equal(trained)


def test_as_many_images_as_runs_of_image_tokens_are_required(trainer: Any) -> None:
    asked = tokenized(trainer.processing_class, picture(1), "two")["input_ids"].tolist()
    with pytest.raises(GenerationError, match="1 runs of image tokens but 2 images"):
        trainer.vllm_generation.generate(asked, [[picture(1), picture(2)]], num_generations=1)


def test_a_model_in_which_vllm_puts_other_tokens_for_an_image_is_refused(tmp_path: Path) -> None:
    trainer = image_trainer("gemma3", tmp_path)
    assert gaps(trainer, sampled(trainer, [None])).max() < EXACT
    with pytest.raises(GenerationError, match=r'sampled after other tokens .*vllm_mode="server"'):
        sampled(trainer, [picture(1)])
    trainer.vllm_generation.close()
