"""Image prompts: features from the server, placed at the runs of image tokens in the trainer's own ids."""

import base64
import io
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from PIL import Image
from support.vision import odd_pictures, picture
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trl_lora_sync.engines.base import Deadline, PromptGroup, Sampling
from trl_lora_sync.engines.images import data_url
from trl_lora_sync.engines.vllm.images import place_images, request_for
from trl_lora_sync.errors import GenerationError, ServerSetupError
from trl_lora_sync.runtime import run

IMAGE_TOKEN = 9
SAMPLING = Sampling(
    temperature=1.0, top_p=1.0, top_k=0, min_p=0.0, repetition_penalty=1.0, max_tokens=4, logprobs=0, image_token_id=9
)
PICTURES = {**odd_pictures(), "RGB": picture(1), "L": picture(1).convert("L")}
RED = Image.new("RGB", (2, 3), "red")
RESTART = "`serve it -- --enable-scale-out`"


def features(images: int) -> dict[str, Any]:
    """As the server renders them: placed in a separate prompt."""
    return {
        "mm_hashes": {"image": [f"hash{i}" for i in range(images)]},
        "mm_placeholders": {"image": [{"offset": 4, "length": 99}] * images, "video": []},
        "kwargs_data": {"image": ["data"] * images},
    }


@pytest.mark.parametrize(
    ("prompt_ids", "runs"),
    [
        ([1, 9, 9, 9, 2], [(1, 3)]),
        ([9, 9, 1, 2], [(0, 2)]),
        ([1, 2, 9], [(2, 1)]),
        ([9, 9, 1, 9, 2, 9, 9], [(0, 2), (3, 1), (5, 2)]),
        ([9], [(0, 1)]),
        ([1, 2], []),
    ],
)
def test_each_run_of_image_tokens_gets_one_image(prompt_ids: list[int], runs: list[tuple[int, int]]) -> None:
    given = features(len(runs))
    placed = place_images(given, prompt_ids, IMAGE_TOKEN)
    assert placed["mm_placeholders"] == {"image": [{"offset": o, "length": n} for o, n in runs], "video": []}
    assert {key: value for key, value in placed.items() if key != "mm_placeholders"} == {
        key: value for key, value in given.items() if key != "mm_placeholders"
    }
    assert given == features(len(runs)), "the server's answer was changed"


@pytest.mark.parametrize(
    ("prompt_ids", "runs", "images"), [([1, 9, 2], 1, 2), ([1, 9, 2, 9], 2, 1), ([1, 2], 0, 1), ([9, 9], 1, 2)]
)
def test_another_number_of_runs_than_of_images_is_refused_with_both(
    prompt_ids: list[int], runs: int, images: int
) -> None:
    with pytest.raises(GenerationError, match=f"{runs} runs of image tokens but {images} images.*chat template"):
        place_images(features(images), prompt_ids, IMAGE_TOKEN)


@pytest.mark.parametrize("image", PICTURES.values(), ids=PICTURES)
def test_data_url_leaves_the_server_nothing_to_convert_in_what_the_trainers_processor_sees(image: Image.Image) -> None:
    """Of transparent images a server saw other colours than the trainer, and some modes were an OSError."""
    head, _, payload = data_url(image).partition(",")
    assert head == "data:image/png;base64"
    back = Image.open(io.BytesIO(base64.b64decode(payload)))
    assert (back.mode, back.info, dict(back.getexif())) == ("RGB", {}, {})
    processor = Qwen2VLImageProcessorPil()
    sent, trained = (processor(images=[one], return_tensors="pt") for one in (back, image))
    assert sent["pixel_values"].equal(trained["pixel_values"])
    assert sent["image_grid_thw"].equal(trained["image_grid_thw"])


def answering(status: int, body: Any) -> tuple[Callable[..., httpx.Response], list[tuple[str, dict[str, Any]]]]:
    """A server's answer to the render request, and the requests that it received."""
    asked: list[tuple[str, dict[str, Any]]] = []

    async def post(path: str, content: dict[str, Any], deadline: Deadline) -> httpx.Response:
        asked.append((path, content))
        form = {"json": body} if isinstance(body, dict) else {"text": body}
        return httpx.Response(status, request=httpx.Request("POST", f"http://host{path}"), **form)

    return post, asked


def request(post: Callable[..., httpx.Response], sampling: Sampling = SAMPLING, prompt: Any = None) -> Any:
    group = PromptGroup(prompt=prompt or [1, 9, 9, 2], count=3, images=[RED])
    return run(request_for(post, "run-v1", group, sampling, Deadline.after(5, "The test"), restart=RESTART))


def test_images_are_rendered_alone_and_then_paired_with_the_trainers_token_ids() -> None:
    post, asked = answering(200, {"features": features(1), "token_ids": [0, 0, 0]})
    path, body = request(post)
    assert asked[0][0] == "/v1/chat/completions/render"
    assert asked[0][1]["messages"] == [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": data_url(RED)}}]}
    ]
    assert path == "/inference/v1/generate"
    assert body["model"] == asked[0][1]["model"] == "run-v1"
    assert body["token_ids"] == [1, 9, 9, 2]
    assert body["features"]["mm_placeholders"]["image"] == [{"offset": 1, "length": 2}]
    assert body["sampling_params"]["n"] == 3
    assert body["sampling_params"]["logprobs"] == 0
    assert body["sampling_params"]["output_kind"] == 2


def test_each_request_has_an_id_of_its_own() -> None:
    post, _ = answering(200, {"features": features(1)})
    assert len({request(post)[1]["request_id"] for _ in range(10)}) == 10


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (404, {"detail": "Not Found"}, "Not Found"),  # vLLM 0.31
        (403, {"error": {"message": "Scale-out endpoints are disabled.", "code": 403}}, "are disabled"),  # and later
    ],
)
def test_server_without_the_route_is_an_error_with_the_flag_to_set(
    status: int, body: dict[str, Any], words: str
) -> None:
    post, _ = answering(status, body)
    with pytest.raises(ServerSetupError, match=rf"--enable-scale-out.*{words}"):
        request(post)


def test_servers_refusal_of_an_image_is_quoted() -> None:
    post, _ = answering(400, {"error": {"message": "At most 0 image(s) may be provided"}})
    with pytest.raises(GenerationError, match=r"HTTP 400.*At most 0 image"):
        request(post)


@pytest.mark.parametrize("body", [{"token_ids": [1]}, {"features": None}, "<html>proxy</html>"])
def test_answer_without_features_is_refused(body: Any) -> None:
    post, _ = answering(200, body)
    with pytest.raises(GenerationError, match=r"no features|without valid JSON"):
        request(post)


@pytest.mark.parametrize(
    ("prompt", "image_token"), [("text with <image>", 9), ([1, 9], None)], ids=["text prompt", "no image token"]
)
def test_images_cannot_be_placed_without_ids_and_image_token(prompt: Any, image_token: int | None) -> None:
    post, asked = answering(200, {"features": features(1)})
    sampling = Sampling(**{**vars(SAMPLING), "image_token_id": image_token})
    with pytest.raises(GenerationError, match="needs token ids and the model's image token"):
        request(post, sampling, prompt)
    assert asked == []
