"""Unit tier: what the SGLang engine sends and reads, and how engines are distinguished."""

import asyncio
import base64
import io
import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.served import PROMPT, SMALL, sampling, soon
from PIL import Image
from support.bodies import bytes_of_body

from trl_lora_sync.adapter.canonical import LoRAModule, pad_packed_modules
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.engines import connect
from trl_lora_sync.engines.base import PromptGroup
from trl_lora_sync.engines.http import NO_KEY, APIKey, HTTPClient
from trl_lora_sync.engines.sglang.completions import read_completion, sampling_params
from trl_lora_sync.engines.sglang.engine import SGLangEngine
from trl_lora_sync.engines.sglang.payload import LoadBody, pickled
from trl_lora_sync.errors import (
    AdapterNotVisibleError,
    AdapterRejectedError,
    GenerationError,
    ServerAuthError,
    ServerSetupError,
)
from trl_lora_sync.runtime import Blocking, Task, run
from trl_lora_sync.servers.transports import HTTPTransport
from trl_lora_sync.testing import VERSIONS, FakeSGLang, ServerArgs, random_adapter
from trl_lora_sync.testing.sglang_scheduler import StrictUnpickler
from unit.servers import Request, serving

pytestmark = pytest.mark.outside

R = 4


@pytest.fixture
def serve() -> Iterator[Callable[..., tuple[FakeSGLang, SGLangEngine]]]:
    with ExitStack() as stack:

        def begin(version: str = "0.5.23", *, is_local: bool = True, **args: Any) -> tuple[FakeSGLang, SGLangEngine]:
            fake = stack.enter_context(FakeSGLang(**{"version": version, "shapes": SMALL, **args}))
            engine = Blocking(SGLangEngine(fake.base_url, is_local=is_local))
            stack.callback(engine.close)
            engine.connect(soon())
            fake.requests.clear()
            return fake, engine

        yield begin


Serve = Callable[..., tuple[FakeSGLang, SGLangEngine]]


# Images

IMAGE_TOKEN = 9
WIDE, SQUARE = Image.new("RGB", (56, 28), "red"), Image.new("RGB", (28, 28), "blue")  # of two tokens and of one
WITH_IMAGES = replace(sampling(logprobs=0), image_token_id=IMAGE_TOKEN)


@pytest.mark.parametrize("version", ["0.5.15", "0.5.23"])
def test_each_image_is_sent_as_one_token_and_the_answer_has_the_trainers_prompt(
    serve: Serve, tmp_path: Path, version: str
) -> None:
    fake, engine = serve(version, image_token_id=IMAGE_TOKEN)
    stored = stored_at(tmp_path)
    engine.load(stored, soon())
    groups = [
        PromptGroup(prompt=[1, 9, 9, 2, 9, 3], images=[WIDE, SQUARE], count=2),
        PromptGroup(prompt=[4, 5], count=1),
        PromptGroup(prompt=[9, 6], images=[SQUARE], count=1),
    ]
    found = engine.generate(stored.name, groups, WITH_IMAGES, soon())
    assert [[one.prompt_ids for one in row] for row in found] == [[group.prompt] * group.count for group in groups]
    sent = [(body["input_ids"], len(body.get("image_data", ()))) for body in fake.bodies("/generate")]
    ours = [one for one in sent if one[0] != [0, 1, 2, 3]]
    with_adapter = [([1, 9, 2, 9, 3], 2)] * 2 + [([[4, 5]], 0), ([9, 6], 1)]
    # Up to 0.5.21, one request to the base model checks that it takes so many images.
    asked = [([1, 9, 2, 9, 3], 2), ([9, 6], 1)] if version < "0.5.22" else []
    assert sorted(ours, key=repr) == sorted(asked + with_adapter, key=repr)
    for row, group in zip(found, groups, strict=True):
        for one in row:
            expected = fake.expected_logprobs(stored.path, group.prompt, one.token_ids)
            assert [values[0] for values in one.logprobs or []] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("prompt", "image", "words"),
    [
        ([1, 9, 2, 9], SQUARE, "2 runs of image tokens but 1 images"),
        ([1, 2], SQUARE, "0 runs of image tokens but 1 images"),
        ([1, 9, 9, 9, 2], WIDE, "belongs to another prompt"),  # the server finds two tokens in this image
    ],
)
def test_a_prompt_whose_images_the_server_sees_in_another_way_is_refused(
    serve: Serve, prompt: list[int], image: Any, words: str
) -> None:
    _, engine = serve(image_token_id=IMAGE_TOKEN)
    base = engine.capabilities.base_model
    with pytest.raises(GenerationError, match=words):
        engine.generate(base, [PromptGroup(prompt=prompt, images=[image], count=1)], WITH_IMAGES, soon())


def test_an_answer_without_its_prompt_is_no_proof_that_images_were_seen(serve: Serve) -> None:
    fake, engine = serve(image_token_id=IMAGE_TOKEN)
    fake.edit_output = lambda output: output.pop("prompt_token_ids", None)
    group = PromptGroup(prompt=[1, 9, 9], images=[WIDE], count=1)
    with pytest.raises(GenerationError, match="no prompt_token_ids"):
        engine.generate(engine.capabilities.base_model, [group], WITH_IMAGES, soon())


@pytest.mark.parametrize("args", [{}, {"version": "0.5.11", "image_token_id": IMAGE_TOKEN}])
def test_a_server_that_would_ignore_images_gets_none(serve: Serve, args: dict[str, Any]) -> None:
    fake, engine = serve(**args)
    group = PromptGroup(prompt=[1, 9, 2], images=[SQUARE], count=1)
    with pytest.raises(GenerationError, match=r"takes none.*SGLang 0\.5\.15 or newer: .*serve"):
        engine.generate(engine.capabilities.base_model, [group], WITH_IMAGES, soon())
    assert not fake.bodies("/generate")


def test_a_model_without_an_image_token_gets_no_images(serve: Serve) -> None:
    _, engine = serve(image_token_id=IMAGE_TOKEN)
    group = PromptGroup(prompt=[1, 9, 2], images=[SQUARE], count=1)
    with pytest.raises(GenerationError, match="names none"):
        engine.generate(engine.capabilities.base_model, [group], sampling(logprobs=0), soon())


# The tensor payload


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_payload_unpickles_under_the_strictest_allow_list(version: str, dtype: torch.dtype, tp_size: int) -> None:
    adapter = random_adapter(SMALL, 1, rank=R)
    adapter = replace(adapter, flat=adapter.flat.to(dtype))
    per_rank = version >= "0.5.17"
    body = LoadBody("a-v1", adapter, per_rank=per_rank, tp_size=tp_size)
    encoded = bytes_of_body(body)
    assert len(body) == len(encoded)
    assert bytes_of_body(body) == encoded  # a retry sends it again
    fields = json.loads(encoded)
    assert fields["config_dict"] == adapter.config()
    if per_rank:
        assert "serialized_tensors" not in fields
        assert len(fields["serialized_named_tensors"]) == tp_size
    payloads = fields["serialized_named_tensors"] if per_rank else [fields["serialized_tensors"]]
    for payload in payloads:
        data = io.BytesIO(base64.b64decode(payload, validate=True))
        found = StrictUnpickler(data, ServerArgs(version=version)).load()
        assert found.keys() == adapter.tensors.keys()
        assert all(torch.equal(found[name], value) for name, value in adapter.tensors.items())


def test_a_payload_writes_the_shared_buffer_once() -> None:
    adapter = random_adapter(SMALL, 1, rank=R)
    size = sum(map(len, pickled(adapter)))
    assert adapter.payload_bytes < size < 1.2 * adapter.payload_bytes + 10_000


@pytest.mark.parametrize(
    ("version", "tokens"), [("0.5.15", ["api"]), ("0.5.21", ["api"]), ("0.5.22", ["admin"]), ("0.5.23", ["admin"])]
)
def test_tensors_are_sent_once_with_the_key_the_version_wants(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str, tokens: list[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "api")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "admin")
    fake, engine = serve(version, api_key="api", admin_api_key="admin")
    stored = Blocking(HTTPTransport(AdapterStore(tmp_path))).write(1, random_adapter(SMALL, 1, rank=R), soon())
    engine.load(stored, soon())
    assert engine.unload(stored.name, soon())
    sent = [(request.path, request.token) for request in fake.requests if request.method == "POST"]
    assert sent == [*(("/load_lora_adapter_from_tensors", t) for t in tokens), ("/unload_lora_adapter", "admin")]


def test_an_admin_key_that_the_server_does_not_have_does_no_harm(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_API_KEY", "api")
    monkeypatch.setenv("SGLANG_ADMIN_API_KEY", "of another server")
    _, engine = serve(api_key="api")
    assert engine.unload("never-loaded", soon())


# Memory


def test_a_restore_of_the_kv_cache_that_was_interrupted_is_not_sent_again(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server carries it out all the same, and a second one, at the end of the run, ended the server."""
    fake, engine = serve(enable_memory_saver=True)
    engine.release_kv_cache(soon())
    restored, left = threading.Event(), threading.Event()
    restore = fake.scheduler.resume_memory

    def without_an_answer(tags: list[str]) -> None:
        restore(tags)
        restored.set()
        left.wait(20)

    monkeypatch.setattr(fake.scheduler, "resume_memory", without_an_answer)
    task = Task(engine.wrapped.restore_kv_cache(soon())).begin()
    assert restored.wait(20)
    task.cancel()
    left.set()
    with pytest.raises(asyncio.CancelledError):
        task.result()
    assert engine.restore_kv_cache(soon())
    group = PromptGroup(prompt=PROMPT, count=1)
    assert engine.generate(engine.capabilities.base_model, [group], sampling(), soon())
    assert fake.death is None


# Fused siblings


def part(*modules: str) -> list[LoRAModule]:
    """The modules of an adapter, as the trainer would hold them."""
    tensors = random_adapter(SMALL, 1, rank=R, modules=modules).tensors
    names = [key.removesuffix(".lora_A.weight") for key in tensors if key.endswith(".lora_A.weight")]
    return [
        LoRAModule(
            name=name.removeprefix("base_model.model."),
            lora_A=tensors[f"{name}.lora_A.weight"],
            lora_B=tensors[f"{name}.lora_B.weight"],
            scaling=1.0,
        )
        for name in names
    ]


def every_shape() -> dict[str, tuple[int, int]]:
    modules = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    return {module.name: SMALL.of(module.name.rpartition(".")[2]) for module in part(*modules)}


@pytest.mark.parametrize(
    ("adapted", "added"),
    [
        (("q_proj", "v_proj"), {"k_proj"}),
        (("k_proj",), {"q_proj", "v_proj"}),
        (("up_proj",), {"gate_proj"}),
        (("q_proj", "up_proj"), {"k_proj", "v_proj", "gate_proj"}),
        (("o_proj", "down_proj"), set()),
    ],
)
@pytest.mark.parametrize("version", ["0.5.11", "0.5.23"])
def test_completed_siblings_keep_the_server_alive_and_the_policy_the_same(
    serve: Serve, adapted: tuple[str, ...], added: set[str], version: str, tmp_path: Path
) -> None:
    """Without them, SGLang refuses some of these adapters and crashes on others."""
    modules = part(*adapted)
    completed = pad_packed_modules(modules, every_shape())
    assert {module.name.rpartition(".")[2] for module in completed[len(modules) :]} == added
    assert len(completed) == SMALL.layers * len({*adapted, *added})
    fake, engine = serve(version)
    stored = Blocking(HTTPTransport(AdapterStore(tmp_path))).write(
        1, FlatBuffer().export(completed, dtype=torch.float32), soon()
    )
    engine.load(stored, soon())
    ((found,),) = engine.generate(stored.name, [PromptGroup(prompt=PROMPT, count=1)], sampling(), soon())
    assert found.logprobs is not None
    expected = fake.expected_logprobs(FlatBuffer().export(modules, dtype=torch.float32), PROMPT, found.token_ids)
    assert [values[0] for values in found.logprobs] == pytest.approx(expected, abs=1e-4)


def test_siblings_that_the_base_does_not_have_are_not_added() -> None:
    shapes = {name: shape for name, shape in every_shape().items() if "up_proj" not in name}
    assert len(pad_packed_modules(part("gate_proj"), shapes)) == SMALL.layers


def test_an_adapter_of_q_and_v_only_is_read_with_its_siblings() -> None:
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from trl_lora_sync.adapter.export import read_adapter

    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        vocab_size=32,
    )  # fmt: skip
    lora = LoraConfig(r=R, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = get_peft_model(LlamaForCausalLM(config), lora)
    plain = read_adapter(model, dtype=torch.float32)
    fused = read_adapter(model, dtype=torch.float32, packed_modules=True)
    assert fused.target_modules == ("k_proj", "q_proj", "v_proj")
    added = fused.tensors.keys() - plain.tensors.keys()
    assert {key.split(".")[-3] for key in added} == {"k_proj"}
    assert all(not fused.tensors[key].any() for key in added)
    key = "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
    assert fused.tensors[key.format("A")].shape == (R, 16)
    assert fused.tensors[key.format("B")].shape == (8, R)
    assert all(torch.equal(fused.tensors[name], value) for name, value in plain.tensors.items())


# Requests


def test_a_request_that_cannot_fit_is_not_sent(serve: Serve) -> None:
    fake, engine = serve(context_length=64)
    for prompt, max_tokens in (([1] * 60, 5), ([1] * 65, 1), ([], 1)):
        group = PromptGroup(prompt=prompt, count=1)
        with pytest.raises(GenerationError, match=r"context of 64|no tokens"):
            engine.generate("/models/tiny-qwen3", [group], sampling(max_tokens=max_tokens), soon())
    assert fake.bodies("/generate") == []
    group = PromptGroup(prompt=[1] * 60, count=1)
    assert engine.generate("/models/tiny-qwen3", [group], sampling(max_tokens=4), soon())


@pytest.mark.parametrize(
    "fields", [{"min_p": 0.1}, {"repetition_penalty": 1.1}, {"extra": {"presence_penalty": 0.5}}], ids=str
)
def test_what_a_speculating_server_would_ignore_is_not_sent(serve: Serve, fields: dict[str, Any]) -> None:
    group = PromptGroup(prompt=PROMPT, count=1)
    fake, engine = serve(speculative_algorithm="NGRAM")
    with pytest.raises(GenerationError, match=r"--speculative-algorithm.*(min_p|_penalty).*`trl-lora-sync serve"):
        engine.generate("/models/tiny-qwen3", [group], sampling(**fields), soon())
    assert fake.bodies("/generate") == []
    assert engine.generate("/models/tiny-qwen3", [group], sampling(), soon())
    _, plain = serve()
    assert plain.generate("/models/tiny-qwen3", [group], sampling(**fields), soon())


def test_seeds_are_sent_only_where_the_server_would_choose_the_same_one(serve: Serve) -> None:
    groups = [PromptGroup(prompt=PROMPT, count=3)]
    for deterministic in (False, True):
        fake, engine = serve(enable_deterministic_inference=deterministic)
        engine.generate("/models/tiny-qwen3", groups, sampling(max_tokens=1), soon())
        params = [one for body in fake.bodies("/generate") for one in body["sampling_params"]]
        seeds = {one["sampling_seed"] for one in params if "sampling_seed" in one}
        assert len(seeds) == (3 if deterministic else 0)


def test_a_seed_by_either_name_advances_with_the_sample() -> None:
    for name in ("seed", "sampling_seed"):
        params = sampling_params(sampling(extra={name: 5}), 2)
        assert params["sampling_seed"] == 7
        assert "seed" not in params


# Answers


def answer(**meta: Any) -> dict[str, Any]:
    plain = {
        "prompt_tokens": len(PROMPT),
        "finish_reason": {"type": "length", "length": 1},
        "output_token_logprobs": [[-0.5, 7, None]],
        "output_top_logprobs": [[[-0.5, 7, None], [None, 3, None], [-2.0, 9, None], [math.nan, 4, None]]],
    }
    return {"output_ids": [7], "meta_info": plain | meta}


def test_alternatives_without_a_finite_logprob_become_none_and_go_last() -> None:
    found = read_completion(answer(), PROMPT, sampling(logprobs=4))
    assert found.logprobs == [[-0.5, -2.0, None, None]]
    assert found.logprob_token_ids == [[7, 9, 3, 4]]


@pytest.mark.parametrize(
    "meta",
    [
        {"output_token_logprobs": [[None, 7, None]]},
        {"output_token_logprobs": [[math.nan, 7, None]]},
        {"output_token_logprobs": [[-math.inf, 7, None]]},
        {"output_token_logprobs": [[-0.5, 8, None]]},
        {"output_token_logprobs": []},
        {"finish_reason": None},
        {"finish_reason": {"type": "abort", "message": "Aborted"}},
        {"finish_reason": {"type": "stop", "matched": "NaN happened"}},
        {"prompt_tokens": None},
        {"prompt_tokens": len(PROMPT) + 1},
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(meta: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"log-probabilit|cut off|NaN|another prompt"):
        read_completion(answer(**meta), PROMPT, sampling(logprobs=0))


def test_a_sample_that_was_aborted_in_the_queue_is_not_taken_for_another_prompts() -> None:
    """Its answer has no length of the prompt (managers/tokenizer_manager.py `_handle_abort_req`)."""
    cut_off = answer(finish_reason={"type": "abort", "message": "Abort in waiting queue"})
    del cut_off["meta_info"]["prompt_tokens"]
    with pytest.raises(ValueError, match=r"cut off.*Abort in waiting queue"):
        read_completion(cut_off, PROMPT, sampling(logprobs=0))


@pytest.mark.parametrize("extra", [{}, {"max_new_tokens": 3}])
def test_a_completion_that_is_shorter_than_asked_for_is_refused(extra: dict[str, Any]) -> None:
    """A server whose KV cache is smaller than its context answers so, with HTTP 200."""
    asked = sampling(logprobs=0, max_tokens=6, extra=extra)
    with pytest.raises(ValueError, match=f"cut off after 1 of {extra.get('max_new_tokens', 6)} tokens"):
        read_completion(answer(), PROMPT, asked, max_model_len=512)


@pytest.mark.parametrize(("most", "max_model_len"), [(1, 512), (6, len(PROMPT) + 3), (6, None)])
def test_a_completion_that_has_all_of_its_tokens_or_fills_the_context_is_taken(
    most: int, max_model_len: int | None
) -> None:
    found = read_completion(answer(), PROMPT, sampling(logprobs=0, max_tokens=most), max_model_len=max_model_len)
    assert found.token_ids == [7]


def test_a_prompt_that_is_repeated_must_be_the_one_that_was_sent() -> None:
    read_completion(answer() | {"prompt_token_ids": PROMPT}, PROMPT, sampling(logprobs=0))
    with pytest.raises(ValueError, match="another prompt"):
        read_completion(answer() | {"prompt_token_ids": PROMPT[::-1]}, PROMPT, sampling(logprobs=0))


@pytest.mark.parametrize("version", VERSIONS)
def test_an_answer_to_another_prompt_is_never_trained_on(serve: Serve, version: str) -> None:
    """A gateway that mixes up the answers of one batch."""
    fake, engine = serve(version)
    swapped = {"prompt_tokens": 3}

    def swap(output: dict[str, Any]) -> None:
        output["meta_info"] |= swapped

    fake.edit_output = swap
    with pytest.raises(GenerationError, match=r"another prompt.*prompt_tokens=3, where 5 were sent"):
        engine.generate("/models/tiny-qwen3", [PromptGroup(prompt=PROMPT, count=1)], sampling(), soon())


# Refused loads


def refusal(words: str) -> tuple[int, Any]:
    return 400, {"success": False, "error_message": words, "loaded_adapters": None}


def stored_at(tmp_path: Path) -> StoredAdapter:
    return AdapterStore(tmp_path / "sync").write(1, random_adapter(SMALL, 1, rank=R))


@pytest.mark.parametrize(
    "words",
    [
        "Repo id must be in the form 'repo_name' or 'namespace/repo_name': 'x'.",
        "404 Client Error. Repository Not Found for url",
        "we cannot find the appropriate snapshot folder ... locate the files on the Hub",
        "[Errno 2] No such file or directory",
        "Cannot find any model weights with `PATH`",
    ],
)
def test_every_way_to_say_that_nothing_is_there_is_understood(serve: Serve, tmp_path: Path, words: str) -> None:
    fake, engine = serve()
    stored = stored_at(tmp_path)
    fake.canned["/load_lora_adapter"] = [refusal(words.replace("PATH", str(stored.server_path)))]
    with pytest.raises(AdapterNotVisibleError, match="lora_sync_server_dir"):
        engine.load(stored, soon())


def test_a_server_without_the_route_is_told_from_an_adapter_that_does_not_fit(serve: Serve, tmp_path: Path) -> None:
    """As SGLang's Rust server has none. The base model was blamed."""
    fake, engine = serve()
    fake.canned["/load_lora_adapter"] = [(404, {"error": {"message": "Not Found"}})]
    with pytest.raises(ServerSetupError, match="without SGLANG_RUST_SERVER"):
        engine.load(stored_at(tmp_path), soon())


def test_the_same_words_about_tensors_are_a_refusal(serve: Serve, tmp_path: Path) -> None:
    fake, engine = serve()
    fake.canned["/load_lora_adapter_from_tensors"] = [refusal("No such file")]
    with pytest.raises(AdapterRejectedError) as caught:
        engine.load(
            Blocking(HTTPTransport(AdapterStore(tmp_path))).write(1, random_adapter(SMALL, 1, rank=R), soon()), soon()
        )
    assert not isinstance(caught.value, AdapterNotVisibleError)


def test_a_directory_that_shows_late_on_another_host_is_waited_for(serve: Serve, tmp_path: Path) -> None:
    fake, engine = serve(is_local=False)
    stored = stored_at(tmp_path)
    fake.canned["/load_lora_adapter"] = [refusal("Repo id must be ..."), refusal("No such file")]
    engine.load(stored, soon())
    assert fake.host_adapters == [stored.name]


# The base model


@pytest.mark.parametrize(
    ("shift", "is_suspicious"), [(0.0, False), (0.2, False), (0.7, False), (0.8, True), (5.0, True), (math.nan, True)]
)
def test_the_gap_of_the_base_is_measured_against_its_spread(shift: float, is_suspicious: bool) -> None:
    ours = [-1.0 - 0.1 * place for place in range(len(PROBE_PROMPT) - 1)]
    gap = TrainedBase(scores=(ours, 1.5)).gap([value + shift for value in ours])
    assert gap is not None
    assert gap.is_suspicious is is_suspicious
    assert gap.spread == 1.5
    if math.isfinite(shift):
        assert gap.mean == pytest.approx(shift)


# Which engine


class Gateway:
    """Answers by path and by token."""

    def __init__(self, token: str | None, found: dict[str, int]) -> None:
        def answer(handler: BaseHTTPRequestHandler) -> None:
            right = token is None or handler.headers.get("Authorization") == f"Bearer {token}"
            handler.send_response(found.get(handler.path, 404) if right else 401)
            handler.send_header("Content-Length", "0")
            handler.end_headers()

        methods = {"do_GET": answer, "log_message": lambda *_: None}
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (BaseHTTPRequestHandler,), methods))
        threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        self.base_url = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "Gateway":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._http.shutdown()
        self._http.server_close()


SGLANG, VLLM = {"/model_info": 200}, {"/version": 200}


@pytest.mark.parametrize(
    ("token", "routes", "keys", "is_sglang"),
    [
        (None, SGLANG, {}, True),
        (None, VLLM, {}, False),
        ("k", SGLANG, {"SGLANG_API_KEY": "k"}, True),
        ("k", SGLANG, {"SGLANG_API_KEY": "k", "VLLM_API_KEY": "other"}, True),
        ("k", VLLM, {"VLLM_API_KEY": "k"}, False),
        ("k", VLLM, {"SGLANG_API_KEY": "other", "VLLM_API_KEY": "k"}, False),
        ("k", SGLANG, {}, None),
        ("k", VLLM, {"VLLM_API_KEY": "wrong"}, None),
    ],
)
def test_the_engine_is_told_behind_a_gateway_that_asks_for_a_key(
    monkeypatch: pytest.MonkeyPatch, token: str | None, routes: dict[str, int], keys: dict[str, str], is_sglang: Any
) -> None:
    for name, key in keys.items():
        monkeypatch.setenv(name, key)
    with Gateway(token, routes) as gateway:
        http = Blocking(HTTPClient(gateway.base_url, api_key=APIKey("VLLM_API_KEY"), is_local=True))
        try:
            if is_sglang is None:
                with pytest.raises(ServerAuthError, match=r"SGLANG_API_KEY.*VLLM_API_KEY") as caught:
                    run(connect.recognise(http.wrapped, soon()))
                assert "wrong" not in str(caught.value)
            else:
                assert (run(connect.recognise(http.wrapped, soon())).name == "sglang") is is_sglang
        finally:
            http.close()


@pytest.mark.parametrize(
    "fail",
    [Request.reset, lambda request: request.send(502), lambda request: request.send(503)],
    ids=["broken off", "502", "503"],
)
@pytest.mark.parametrize("routes", [SGLANG, VLLM])
def test_the_engine_is_told_after_a_request_that_fails_once(
    fail: Callable[[Request], None], routes: dict[str, int]
) -> None:
    """The start ended with the failure, or SGLang was taken for vLLM."""
    failures = [fail]

    def answer(request: Request) -> None:
        if request.path == "/model_info" and failures:
            failures.pop()(request)
        else:
            request.send(routes.get(request.path, 404))

    with serving(answer) as server:
        http = Blocking(HTTPClient(server.url, api_key=NO_KEY, is_local=True))
        assert (run(connect.recognise(http.wrapped, soon())).name == "sglang") is (routes is SGLANG)
        http.close()


@pytest.mark.parametrize("routes", [SGLANG, VLLM])
def test_no_key_goes_to_a_server_that_tells_its_engine_without_one(
    monkeypatch: pytest.MonkeyPatch, routes: dict[str, int]
) -> None:
    for name in ("SGLANG_API_KEY", "VLLM_API_KEY"):
        monkeypatch.setenv(name, "of another server")
    with serving(lambda request: request.send(200 if request.path in {*routes, "/health"} else 404)) as server:
        http = Blocking(HTTPClient(server.url, api_key=NO_KEY, is_local=True))
        run(connect.wait_until_up(server.url, is_local=True, deadline=soon()))
        assert (run(connect.recognise(http.wrapped, soon())).name == "sglang") is (routes is SGLANG)
        http.close()
        assert [request.headers.get("Authorization") for request in server.requests] == [None, None]
