"""Contract tier: the fake SGLang obeys the rules that the engine has to work around. Talks HTTP only."""

import base64
import http.client
import io
import json
import pickle
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from PIL import Image
from support.adapters import with_tensors

from contract.served import SMALL, Served, soon
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engines.images import data_url
from trl_lora_sync.errors import ServerSetupError
from trl_lora_sync.testing import MODULES, VERSIONS, FakeSGLang, random_adapter

ONE = {"max_new_tokens": 1}


class Client:
    """Requests to one fake, as any client would send them."""

    def __init__(self, fake: FakeSGLang, store: AdapterStore) -> None:
        self.fake, self._store = fake, store
        self._http = httpx.Client(base_url=fake.base_url, trust_env=False, verify=False, timeout=10)

    def post(self, path: str, timeout_s: float = 10.0, **body: Any) -> httpx.Response:
        return self._http.post(path, json=body, timeout=timeout_s)

    def load(self, adapter: CanonicalAdapter | int = 1, **body: Any) -> StoredAdapter:
        adapter = random_adapter(SMALL, adapter, rank=8) if isinstance(adapter, int) else adapter
        stored = self._store.write(len(self.fake.requests), adapter)
        answer = self.post("/load_lora_adapter", lora_name=stored.name, lora_path=stored.server_path, **body)
        assert answer.status_code == 200, answer.text
        return stored

    def generate(self, name: str | None, timeout_s: float = 10.0, **body: Any) -> httpx.Response:
        fields = {"input_ids": [1, 2, 3], "sampling_params": ONE, "lora_path": name}
        return self.post("/generate", timeout_s, **{**fields, **body})

    def unload(self, name: str, timeout_s: float = 10.0) -> httpx.Response:
        return self.post("/unload_lora_adapter", timeout_s, lora_name=name)

    def is_refused(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", int(self.fake.base_url.rpartition(":")[2]))) != 0


@pytest.fixture
def start(store: AdapterStore) -> Callable[..., Client]:
    running = []

    def begin(version: str = "0.5.23", **args: Any) -> Client:
        fake = FakeSGLang(**{"version": version, "shapes": SMALL, **args}).start()
        running.append(fake)
        return Client(fake, store)

    yield begin
    for fake in running:
        fake.stop()


def without(adapter: CanonicalAdapter, *modules: str) -> CanonicalAdapter:
    return changed(adapter, lambda name, value: None if any(f".{m}." in name for m in modules) else value)


def changed(adapter: CanonicalAdapter, change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> CanonicalAdapter:
    tensors = {name: change(name, value) for name, value in adapter.tensors.items()}
    return with_tensors(adapter, {name: value for name, value in tensors.items() if value is not None})


def tensor_body(version: str, payload: str, ranks: int = 1) -> dict[str, Any]:
    config = random_adapter(SMALL, 1, rank=8).config()
    is_list = version >= "0.5.17"
    field = {"serialized_named_tensors": [payload] * ranks} if is_list else {"serialized_tensors": payload}
    return {"lora_name": "sent", "config_dict": config, **field}


def pickled(value: Any, protocol: int = 4) -> str:
    return base64.b64encode(pickle.dumps(value, protocol=protocol)).decode()


# What kills the server


@pytest.mark.parametrize("missing", [("q_proj",), ("gate_proj",)])
def test_missing_siblings_kill_the_server_at_the_first_batch(
    start: Callable[..., Client], missing: tuple[str, ...]
) -> None:
    client = start()
    name = client.load(without(random_adapter(SMALL, 1, rank=8), *missing)).name
    assert client.generate(None).status_code == 200
    with pytest.raises(httpx.TransportError):
        client.generate(name)
    assert "Cannot find target module" in (client.fake.death or "")
    assert client.is_refused()


def test_a_missing_v_is_refused_at_the_load_with_its_key(start: Callable[..., Client], store: AdapterStore) -> None:
    client = start()
    stored = store.write(1, without(random_adapter(SMALL, 1, rank=8), "v_proj"))
    answer = client.post("/load_lora_adapter", lora_name="a", lora_path=stored.server_path)
    assert answer.status_code == 400
    assert "v_proj.lora_A" in answer.json()["error_message"]


def test_missing_k_or_up_are_zero(start: Callable[..., Client]) -> None:
    client = start()
    adapter = without(random_adapter(SMALL, 1, rank=8), "k_proj", "up_proj")
    answer = client.generate(client.load(adapter).name, return_logprob=True).json()
    expected = client.fake.expected_logprobs(adapter, [1, 2, 3], answer["output_ids"])
    assert answer["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize(
    "change",
    [
        lambda name, value: value[:, :-1] if "q_proj.lora_A" in name else value,
        lambda name, value: value[:-1] if "v_proj.lora_B" in name else value,
        lambda name, value: value[:-1] if "down_proj.lora_B" in name else value,
        lambda name, value: torch.cat([value, value]) if "o_proj.lora_B" in name else value,
    ],
)
def test_other_shapes_load_and_kill_the_server_at_the_first_batch(start: Callable[..., Client], change: Any) -> None:
    client = start()
    adapter = random_adapter(SMALL, 1, rank=8)
    if change("model.q_proj.lora_A", torch.zeros(2, 2)).shape[1] == 1:  # q, k and v share their width
        adapter = changed(adapter, lambda n, v: v[:, :-1] if ".lora_A" in n and "self_attn.o" not in n else v)
    else:
        adapter = changed(adapter, change)
    name = client.load(adapter).name
    with pytest.raises(httpx.TransportError):
        client.generate(name)
    assert "does not match weight shape" in (client.fake.death or "")


def test_matrices_that_are_too_large_where_they_are_sharded_are_cut_off_silently(start: Callable[..., Client]) -> None:
    """lora/layers.py slices lora_B of gate and up, and lora_A of o and down, even for a single rank."""
    client = start()
    right = random_adapter(SMALL, 1, rank=8)
    wide = changed(right, lambda name, value: torch.cat([value, value], 1) if "down_proj.lora_A" in name else value)
    answer = client.generate(client.load(wide).name, return_logprob=True).json()
    expected = client.fake.expected_logprobs(right, [1, 2, 3], answer["output_ids"])
    assert answer["meta_info"]["output_token_logprobs"][0][0] == pytest.approx(expected[0], abs=1e-5)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_id_outside_of_the_vocabulary_kills_the_server(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    with pytest.raises(httpx.TransportError):
        client.generate(None, input_ids=[SMALL.vocab])
    assert client.is_refused()


@pytest.mark.parametrize("version", VERSIONS)
def test_the_vocabulary_can_be_asked_through_logit_bias(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    for token, status in ((SMALL.vocab - 1, 200), (SMALL.vocab, 400)):
        answer = client.generate(None, sampling_params={**ONE, "logit_bias": {str(token): 0.0}})
        assert answer.status_code == status
    assert "logit_bias must has keys in [0, 259]" in answer.text


# Tensors


@pytest.mark.parametrize("version", VERSIONS)
def test_tensors_are_taken_in_the_versions_own_form_only(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    payload = pickled(random_adapter(SMALL, 1, rank=8).tensors)
    other = "0.5.17" if version < "0.5.17" else "0.5.16"
    assert client.post("/load_lora_adapter_from_tensors", **tensor_body(other, payload)).status_code == 400
    assert client.post("/load_lora_adapter_from_tensors", **tensor_body(version, payload)).status_code == 200
    assert client.generate("sent").status_code == 200
    client.unload("sent")
    answer = client.generate("sent")  # "__tensor__" is not a path to read again
    assert answer.status_code == 400
    assert "Failed to implicitly load LoRA adapter sent" in answer.text


@pytest.mark.parametrize("version", ["0.5.17", "0.5.23"])
def test_one_payload_for_two_ranks_kills_the_server(start: Callable[..., Client], version: str) -> None:
    client = start(version, tp_size=2)
    payload = pickled(random_adapter(SMALL, 1, rank=8).tensors)
    with pytest.raises(httpx.TransportError):
        client.post("/load_lora_adapter_from_tensors", **tensor_body(version, payload))
    assert "IndexError" in (client.fake.death or "")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("value", [{"x": print}, {"x": io.BytesIO}, torch.nn.Linear(1, 1)])
def test_foreign_objects_in_a_payload_kill_the_server(start: Callable[..., Client], version: str, value: Any) -> None:
    client = start(version)
    with pytest.raises(httpx.TransportError):
        client.post("/load_lora_adapter_from_tensors", **tensor_body(version, pickled(value)))
    assert "Blocked unsafe" in (client.fake.death or "")


# References


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unload_waits_for_running_requests(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    name = client.load().name
    with ThreadPoolExecutor() as pool:
        with client.fake.hold():
            running = pool.submit(client.generate, name)
            client.fake.wait_until(lambda: client.fake.in_flight[name] == 1)
            unload = pool.submit(client.unload, name)
            client.fake.wait_until(lambda: not client.fake.registered)
            assert not unload.done()
        assert running.result().status_code == 200
        assert unload.result().status_code == 200
    assert client.fake.host_adapters == []


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("queued", "keeping"), [(False, ("0.5.15", "0.5.17")), (True, [one for one in VERSIONS if one < "0.5.22"])]
)
def test_what_a_client_that_leaves_keeps_in_use(
    start: Callable[..., Client], version: str, queued: bool, keeping: Sequence[str]
) -> None:
    client = start(version)
    name = client.load().name
    body = json.dumps({"input_ids": [1, 2, 3], "sampling_params": ONE, "lora_path": name})
    leaving = http.client.HTTPConnection(client.fake.base_url.removeprefix("http://"))
    with client.fake.hold(queued=queued):
        leaving.request("POST", "/generate", body)
        client.fake.wait_until(lambda: client.fake.running == 1)
        leaving.close()
        client.fake.wait_until(lambda: client.fake.running == 0)
    assert client.fake.in_flight[name] == (1 if version in keeping else 0)


@pytest.mark.parametrize("version", VERSIONS)
def test_an_abort_in_the_queue_keeps_the_reference_up_to_0_5_21(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    name = client.load().name
    with ThreadPoolExecutor() as pool, client.fake.hold(queued=True):
        queued = pool.submit(client.generate, name)
        client.fake.wait_until(lambda: client.fake.running == 1)
        client.post("/abort_request", abort_all=True)
        answer = queued.result()
    assert answer.status_code == 200
    meta = answer.json()["meta_info"]
    assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
    assert "prompt_tokens" not in meta
    assert client.fake.in_flight[name] == (0 if version >= "0.5.22" else 1)


def test_the_beginning_of_an_id_aborts_nothing(start: Callable[..., Client]) -> None:
    client = start()
    with ThreadPoolExecutor() as pool, client.fake.hold(queued=True):
        queued = pool.submit(client.generate, None, rid="abc")
        client.fake.wait_until(lambda: client.fake.running == 1)
        client.post("/abort_request", rid="ab")
        client.fake.let_go()
        assert queued.result().json()["meta_info"]["finish_reason"]["type"] == "length"


def test_an_unloaded_name_is_loaded_again_without_a_word(start: Callable[..., Client]) -> None:
    client = start()
    name = client.load().name
    assert client.unload(name).json()["success"]
    assert client.fake.host_adapters == []
    assert client.generate(name).status_code == 200
    assert client.fake.host_adapters == [name]


def test_too_many_adapters_are_evicted_through_the_unload_that_waits(start: Callable[..., Client]) -> None:
    client = start(max_loaded_loras=2, max_loras_per_batch=2)
    first = client.load(1).name
    second = client.load(2).name
    client.generate(first)
    third = client.load(3).name
    assert client.fake.host_adapters == [first, third]
    with ThreadPoolExecutor() as pool, client.fake.hold():
        running = pool.submit(client.generate, first)
        client.fake.wait_until(lambda: client.fake.in_flight[first] == 1)
        client.load(4)  # `third` is now the least recently used
        client.fake.let_go()
        running.result()
    assert second not in client.fake.host_adapters


@pytest.mark.parametrize("version", VERSIONS)
def test_an_unload_frees_the_slot_from_0_5_17_on(start: Callable[..., Client], version: str) -> None:
    client = start(version)
    name = client.load().name
    client.generate(name)
    client.unload(name)
    assert client.fake.gpu_slots == (1 if version >= "0.5.17" else 2)


def test_the_gpu_pool_evicts_and_copies_again(start: Callable[..., Client]) -> None:
    client = start(max_loras_per_batch=2)
    names = [client.load(seed).name for seed in (1, 2, 3)]
    for name in [*names, *names]:
        assert client.generate(name).status_code == 200
        assert client.fake.gpu_slots <= 2
    assert len(client.fake.host_adapters) == 3


# Pausing and memory


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_an_unload_while_paused_waits_until_generation_continues(start: Callable[..., Client], mode: str) -> None:
    client = start()
    name = client.load().name
    with ThreadPoolExecutor() as pool:
        with client.fake.hold():
            running = pool.submit(client.generate, name)
            client.fake.wait_until(lambda: client.fake.in_flight[name] == 1)
            assert client.post("/pause_generation", mode=mode).json()["status"] == "ok"
        unload = pool.submit(client.unload, name)
        blocked = pool.submit(client.generate, None)
        client.fake.wait_until(lambda: not client.fake.registered)  # it has the lock that a load wants
        with pytest.raises(httpx.ReadTimeout):
            client.post("/load_lora_adapter", 0.2, lora_name="b", lora_path="/x/y")
        assert not any(future.done() for future in (unload, running, blocked))
        client.post("/continue_generation")
        assert [future.result().status_code for future in (running, unload, blocked)] == [200] * 3


def test_a_release_under_running_requests_kills_the_server(start: Callable[..., Client]) -> None:
    client = start()
    with ThreadPoolExecutor() as pool, client.fake.hold():
        running = pool.submit(client.generate, None)
        client.fake.wait_until(lambda: client.fake.running == 1)
        with pytest.raises(httpx.TransportError):
            client.post("/release_memory_occupation", tags=["kv_cache"])
        with pytest.raises(httpx.TransportError):
            running.result()


def test_weights_do_not_survive_their_release(start: Callable[..., Client]) -> None:
    client = start(enable_memory_saver=True)
    ask = {"sampling_params": {**ONE, "temperature": 0.0}, "return_logprob": True}
    before = client.generate(None, **ask).json()["meta_info"]["output_token_logprobs"]
    for tag, survives in (("kv_cache", True), ("weights", False)):
        client.post("/release_memory_occupation", tags=[tag])
        client.post("/resume_memory_occupation", tags=[tag])
        assert (client.generate(None, **ask).json()["meta_info"]["output_token_logprobs"] == before) is survives


# Refusals


def test_attention_data_parallelism_takes_pinned_adapters_only(
    start: Callable[..., Client], store: AdapterStore
) -> None:
    client = start(attn_dp_size=2)
    stored = store.write(1, random_adapter(SMALL, 1, rank=8))
    for pinned, status in ((False, 400), (True, 200)):
        answer = client.post("/load_lora_adapter", lora_name="a", lora_path=stored.server_path, pinned=pinned)
        assert answer.status_code == status


def test_data_parallel_replicas_answer_500(start: Callable[..., Client]) -> None:
    client = start(dp_size=2)
    assert client.post("/load_lora_adapter", lora_name="a", lora_path="/x/y").status_code == 500


def test_a_module_outside_of_the_target_modules_is_refused(start: Callable[..., Client], store: AdapterStore) -> None:
    client = start(lora_target_modules=MODULES[:3])
    stored = store.write(1, random_adapter(SMALL, 1, rank=8))
    answer = client.post("/load_lora_adapter", lora_name="a", lora_path=stored.server_path)
    assert answer.status_code == 400
    assert "--lora-target-modules" in answer.json()["error_message"]


PICTURE = data_url(Image.new("RGB", (56, 28)))  # two tokens


def test_a_model_of_text_ignores_images_without_an_error(start: Callable[..., Client]) -> None:
    client = start()
    answer = client.generate(None, input_ids=[1, 9, 2], image_data=[PICTURE])
    assert (answer.status_code, answer.json()["meta_info"]["prompt_tokens"]) == (200, 3)


@pytest.mark.parametrize("batch", [False, True])
def test_each_image_token_becomes_as_many_as_its_image_has(start: Callable[..., Client], batch: bool) -> None:
    client = start(image_token_id=9)
    prompts, images = ([[1, 9, 2], [3]], [[PICTURE], []]) if batch else ([1, 9, 2], PICTURE)
    answer = client.generate(None, input_ids=prompts, image_data=images, return_prompt_token_ids=True)
    found = answer.json() if batch else [answer.json()]
    assert [one["prompt_token_ids"] for one in found] == [[1, 9, 9, 2], [3]][: len(found)]


def test_a_prompt_that_has_the_tokens_of_its_image_already_is_an_error_and_keeps_the_adapter_in_use(
    start: Callable[..., Client],
) -> None:
    client = start("0.5.15", image_token_id=9)
    stored = client.load()
    assert client.generate(stored.name, input_ids=[1, 9, 9, 2], image_data=[PICTURE]).status_code == 500
    assert client.fake.in_flight[stored.name] == 1


def test_modules_that_see_images_are_refused_with_what_to_exclude(few: Served) -> None:
    with pytest.raises(ServerSetupError, match=r"exclude_modules=r"):
        few.engine.score_image("any", [1, 2, 3], None, 2, 1, soon())
