"""Live tier: adapters added to the weights of a real vLLM server.

What every server must do is in `contract/test_engine_contract.py`, which runs against this one too.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from conftest import FUSED_KEY
from contract.reference import PeftReference
from contract.served import sampling, soon
from safetensors.torch import load_file, save_file
from support.adapters import make_foreign
from support.models import lora, randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.shared_memory import shared_folder, use_pinned_files, written_damaged
from support.trainers import grpo_trainer, steps_of, wait_for_unloads
from versus.scoring import prompt_logprobs
from vllm_server import VLLMServer

from trl_lora_sync.adapter.canonical import LoRAModule
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engine_plugins.reservations import ReservationClient
from trl_lora_sync.engine_plugins.vllm_fused import BASE, HEADER, MIDDLEWARE, ROUTE, WORKER
from trl_lora_sync.engines.base import PromptGroup
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.vllm.fused import VLLMFusedEngine
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, ServerSetupError
from trl_lora_sync.runtime import Blocking, run

ROOT = Path(__file__).parents[2]
RIGHT = {"Authorization": f"Bearer {FUSED_KEY}"}
# Several blocks of the prefix cache.
LONG = token_ids(3, 100)
FIRST = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


@dataclass
class Fused:
    """The shared server, an engine that is connected to it, and the truth about its base model."""

    server: VLLMServer
    engine: VLLMFusedEngine
    reference: PeftReference
    store: AdapterStore
    versions: int = 0

    @property
    def base(self) -> str:
        return self.engine.capabilities.base_model

    def write(self, seed: int, **changes: Any) -> StoredAdapter:
        self.versions += 1
        return self.store.write(self.versions, self.reference.adapter(seed, **changes))

    def load(self, seed: int) -> str:
        stored = self.write(seed)
        self.engine.load(stored, soon(60))
        return stored.name

    def score(self, model: str) -> list[float]:
        return prompt_logprobs(self.engine, model, LONG, soon(60))

    def gap(self, found: list[float], seed: int | None, ids: list[int] = LONG, prompt: int = 1) -> float:
        """Mean distance to the adapter of a seed, or to the base."""
        adapter = None if seed is None else self.reference.adapter(seed)
        expected = self.reference.logprobs(adapter, ids[:prompt], ids[prompt:])
        return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)

    def state(self) -> dict[str, Any]:
        return self.ask("GET").json()

    def ask(self, method: str, rest: str = "", body: Any = None, headers: dict[str, str] = RIGHT) -> httpx.Response:
        url = f"{self.server.base_url}{ROUTE}{rest}"
        return httpx.request(method, url, headers=headers, json=body, timeout=60, trust_env=False)


@pytest.fixture(scope="module")
def reference(base_model: Path) -> PeftReference:
    return PeftReference(base_model)


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)


@pytest.fixture
def fused(fused_server: VLLMServer, reference: PeftReference, tmp_path: Path) -> Iterator[Fused]:
    """The server, alive, with the base in its weights and no adapter before and after the test."""
    store = AdapterStore(tmp_path / "store")
    engine = Blocking(VLLMFusedEngine(fused_server.base_url, is_local=True))
    engine.connect(soon(60))
    fused = Fused(fused_server, engine, reference, store)
    try:
        yield fused
        for name in engine.loaded(soon()):
            if name.startswith(store.run_id):
                assert engine.unload(name, soon(60))
        state = fused.state()
        assert (state["current"], state["adapters"], state["broken"]) == (BASE, {}, None)
    finally:
        engine.close()
        store.close()


def change_file(stored: StoredAdapter, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Change the tensors of a version, and remove the trainer's checksum of it."""
    assert stored.path
    file = stored.path / "adapter_model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    make_foreign(stored.path)


def test_a_version_that_was_damaged_on_the_way_is_refused(fused: Fused) -> None:
    good = fused.load(1)
    before = fused.score(good)
    stored = fused.write(2)
    assert stored.path
    file = stored.path / "adapter_model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    with pytest.raises(AdapterNotVisibleError, match="its tensors have the checksum"):
        fused.engine.load(stored, soon(60))
    assert fused.score(good) == before


def test_the_base_comes_back_bit_for_bit_after_many_versions(fused: Fused) -> None:
    before = fused.score(fused.base)
    for seed in range(6):
        name = fused.load(seed)
        assert fused.gap(fused.score(name), seed) < fused.reference.tolerance
        assert fused.gap(fused.score(name), None) > 5 * fused.reference.tolerance
    assert fused.score(fused.base) == before


def test_an_adapter_of_zeros_is_the_base_bit_for_bit(fused: Fused) -> None:
    before = fused.score(fused.base)
    stored = fused.write(1)
    change_file(stored, lambda tensors: [one.zero_() for name, one in tensors.items() if "lora_A" not in name])
    fused.engine.load(stored, soon(60))
    assert fused.score(stored.name) == before
    assert fused.state()["current"] == stored.name


def test_an_output_head_is_adapted_like_any_linear_layer(fused: Fused) -> None:
    """TRL (1.16) refuses it as a target. Other trainers and earlier versions do not."""
    before, random = fused.score(fused.base), torch.Generator().manual_seed(5)
    lora_A, lora_B = (0.3 * torch.randn(shape, generator=random) for shape in ((8, 128), (fused.reference.vocab, 8)))
    adapter = FlatBuffer().export(
        [LoRAModule(name="lm_head", lora_A=lora_A, lora_B=lora_B, scaling=0.5)], dtype=torch.bfloat16
    )
    stored = fused.store.write(0, adapter)
    fused.engine.load(stored, soon(60))
    found, expected = fused.score(stored.name), fused.reference.logprobs(adapter, LONG[:1], LONG[1:])
    assert sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(found) < fused.reference.tolerance
    assert fused.gap(found, None) > 5 * fused.reference.tolerance
    assert fused.score(fused.base) == before


def test_a_prompt_that_was_cached_is_computed_anew_for_each_version(fused: Fused) -> None:
    names = [fused.load(seed) for seed in (1, 2)]
    for seed, name in [(1, names[0]), (2, names[1]), (None, fused.base), (1, names[0])]:
        for _ in range(2):
            group = PromptGroup(prompt=LONG, count=2)
            for row in fused.engine.generate(name, [group], sampling(max_tokens=4), soon(60))[0]:
                assert row.logprobs is not None
                found = [token[0] for token in row.logprobs]
                assert None not in found
                assert fused.gap(found, seed, LONG + row.token_ids, len(LONG)) < 2 * fused.reference.tolerance  # type: ignore[arg-type]


def test_a_version_that_is_loaded_during_a_request_waits_for_it(fused: Fused) -> None:
    first = fused.load(1)
    group = PromptGroup(prompt=LONG, count=1)
    log_before = len(fused.server.log_path.read_text())

    def generate() -> Any:
        fields = {"max_tokens": 400, "extra": {"ignore_eos": True}}
        return fused.engine.generate(first, [group], sampling(**fields), soon(60))[0][0]

    def load() -> str:
        assert sampled.wait(30)
        return fused.load(2)

    sampled = threading.Event()
    before = sampled_tokens(fused.server)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(generate)
        until_sampling(fused.server, before)
        sampled.set()
        loading = pool.submit(load)
        row, second = running.result(60), loading.result(60)
    # The server's own order: a load is quicker than a client that takes in 400 tokens.
    log = fused.server.log_path.read_text()[log_before:]
    assert 0 < log.index("POST /v1/completions") < log.index(f"The weights hold {second} now")
    found = [token[0] for token in row.logprobs]
    assert len(found) == 400
    assert fused.gap(found, 1, LONG + row.token_ids, len(LONG)) < fused.reference.tolerance
    assert fused.gap(fused.score(second), 2) < fused.reference.tolerance


def sampled_tokens(server: VLLMServer) -> float:
    """By all requests so far; unlike the number of running ones, it shows a request that has ended as well."""
    text = httpx.get(f"{server.base_url}/metrics", timeout=30, trust_env=False).text
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("vllm:generation_tokens_total"))


def until_sampling(server: VLLMServer, before: float) -> None:
    deadline = time.monotonic() + 60
    while sampled_tokens(server) <= before:
        assert time.monotonic() < deadline, "no request ever ran"


def test_requests_for_two_versions_at_once_are_each_sampled_from_their_own(fused: Fused) -> None:
    names = {seed: fused.load(seed) for seed in (1, 2)}
    seeds = [1, 2, 2, 1, 1, 2, 1, 2]
    with ThreadPoolExecutor(len(seeds)) as pool:
        for seed, found in zip(seeds, pool.map(lambda seed: fused.score(names[seed]), seeds), strict=True):
            assert fused.gap(found, seed) < fused.reference.tolerance


def with_nan(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST][0, 0] = float("nan")


def of_another_width(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = torch.cat([tensors[FIRST], torch.ones(1, 8)])


def narrower(tensors: dict[str, torch.Tensor]) -> None:
    tensors[FIRST] = tensors[FIRST][:-1].contiguous()


def with_an_unknown_module(tensors: dict[str, torch.Tensor]) -> None:
    for kind in "AB":
        tensors[f"base_model.model.model.layers.0.mlp.strange_proj.lora_{kind}.weight"] = torch.ones(8, 8)


def with_a_layer_too_many(tensors: dict[str, torch.Tensor]) -> None:
    for kind in "AB":
        name = FIRST.replace("lora_B", f"lora_{kind}")
        tensors[name.replace("layers.0", "layers.7")] = tensors[name].clone()


def with_a_narrow_output_layer(tensors: dict[str, torch.Tensor]) -> None:
    for kind, shape in {"A": (8, 128), "B": (259, 8)}.items():
        tensors[f"base_model.model.lm_head.lora_{kind}.weight"] = torch.ones(shape)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (with_nan, "NaN or infinity, in model.layers.0.self_attn.q_proj.lora_B"),
        (of_another_width, r"of shape \(128, 128\) in the served model, not \(129, 128\)"),
        (narrower, r"of shape \(128, 128\) in the served model, not \(127, 128\)"),
        (with_an_unknown_module, "strange_proj"),
        (with_a_layer_too_many, "layers.7"),
        (with_a_narrow_output_layer, r"lm_head'.*\(259, 128\)"),
    ],
)
def test_a_version_that_is_refused_changes_nothing(
    fused: Fused, change: Callable[[dict[str, torch.Tensor]], None], words: str
) -> None:
    base = fused.score(fused.base)
    good = fused.load(1)
    before = fused.score(good)
    stored = fused.write(2)
    change_file(stored, change)
    with pytest.raises(AdapterRejectedError, match=words):
        fused.engine.load(stored, soon(60))
    assert (fused.state()["current"], list(fused.engine.loaded(soon()))) == (good, [good])
    assert fused.score(good) == before
    assert fused.score(fused.base) == base
    assert fused.gap(fused.score(fused.load(3)), 3) < fused.reference.tolerance


def test_a_path_that_vllm_cannot_pass_to_its_workers_changes_nothing(fused: Fused) -> None:
    """The version before came back into the weights, and requests for the base were sampled from it."""
    base = fused.score(fused.base)
    assert fused.engine.unload(fused.load(1), soon(60))
    url = f"{fused.server.base_url}{ROUTE}/v2"
    answer = httpx.put(url, headers=RIGHT, content=b'{"path": "/\\ud800"}', timeout=60, trust_env=False)
    assert answer.status_code == 400
    assert fused.score(fused.base) == base
    assert fused.state()["broken"] is None


def test_only_the_key_of_the_server_opens_the_routes(fused: Fused) -> None:
    stored = fused.write(1)
    for headers in ({}, {"Authorization": "Bearer wrong"}):
        assert fused.ask("GET", headers=headers).status_code == 401
        assert fused.ask("PUT", f"/{stored.name}", {"path": stored.server_path}, headers).status_code == 401
        assert fused.ask("DELETE", f"/{stored.name}", headers=headers).status_code == 401
        url, body = f"{fused.server.base_url}/v1/completions", {"model": fused.base, "prompt": [1], "max_tokens": 1}
        for name in ({}, {HEADER: BASE}):
            assert httpx.post(url, json=body, headers=headers | name, trust_env=False).status_code == 401
    assert fused.state()["adapters"] == {}


def test_a_request_of_any_client_is_told_what_it_was_sampled_from(fused: Fused) -> None:
    name = fused.load(1)
    url, body = f"{fused.server.base_url}/v1/completions", {"model": fused.base, "prompt": [1], "max_tokens": 1}
    assert httpx.post(url, json=body, headers=RIGHT, timeout=60, trust_env=False).headers[HEADER] == name
    streamed = httpx.post(url, json={**body, "stream": True}, headers=RIGHT, timeout=60, trust_env=False)
    assert streamed.headers[HEADER] == name


def test_the_setting_must_fit_the_server(fused: Fused, server: VLLMServer) -> None:
    with pytest.raises(ServerSetupError, match=r'lora_sync_serving="fused"'):
        Blocking(run(connect_engine(fused.server.base_url, engine="auto", is_local=True, deadline=soon(60))))
    with pytest.raises(ServerSetupError, match=r"Restart it with `trl-lora-sync serve vllm .* --fused --port \d+"):
        Blocking(run(connect_engine(server.base_url, engine="auto", is_local=True, deadline=soon(60), serving="fused")))


@pytest.mark.parametrize("transport", ["disk", "push"])
def test_a_run_trains_the_policy_it_samples_from_and_leaves_the_base(
    fused: Fused, base_model: Path, tmp_path: Path, transport: str
) -> None:
    before = fused.score(fused.base)
    trainer = grpo_trainer(
        fused.server.base_url,
        base_model,
        tmp_path,
        lora_sync_serving="fused",
        lora_sync_transport=transport,
        max_steps=4,
    )
    trainer.train()
    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4]
    assert all(step["sampling/sampling_logp_difference/mean"] < 0.02 for step in steps)
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(seed) for seed in range(4)]))
    trainer.vllm_generation.close()
    wait_for_unloads(trainer)
    assert fused.state()["current"] == BASE
    assert fused.score(fused.base) == before
    assert not (tmp_path / "sync").exists()


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """What servers answer to versions past HTTP."""
    answers: list[str | None] = []
    confirm = ReservationClient.confirm

    async def noted(client: ReservationClient, *given: str) -> str | None:
        answers.append(await confirm(client, *given))
        return answers[-1]

    monkeypatch.setattr(ReservationClient, "confirm", noted)
    return answers


def test_versions_of_a_run_are_loaded_past_http(
    fused: Fused, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: list[str | None]
) -> None:
    use_pinned_files(monkeypatch)
    before = fused.score(fused.base)
    with shared_folder() as folder:
        settings = {"lora_sync_dir": str(folder), "lora_sync_serving": "fused"}
        trainer = grpo_trainer(fused.server.base_url, base_model, tmp_path, max_steps=6, **settings)
        trainer.train()
        steps = steps_of(trainer)
        assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4, 5, 6]
        assert all(step["sampling/sampling_logp_difference/mean"] < 0.02 for step in steps)
        # The first one has none before it.
        assert len(answers) >= 4
        assert all(answers)
        trainer.vllm_generation.close()
        wait_for_unloads(trainer)
    assert fused.score(fused.base) == before


def test_a_model_whose_base_lacks_the_initial_adapter_is_added_to_the_checkpoints_base(
    fused: Fused, base_model: Path, tmp_path: Path
) -> None:
    before = fused.score(fused.base)
    trainer = grpo_trainer(
        fused.server.base_url,
        base_model,
        tmp_path,
        peft_config=lora(init_lora_weights="pissa"),
        lora_sync_serving="fused",
        max_steps=2,
    )
    trainer.train()
    assert [step["lora_sync/verified"] for step in steps_of(trainer)] == [1, 1]
    for seed in range(50):
        randomize_adapter(trainer.model, seed=seed)
        trainer.vllm_generation.sync_weights()
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(seed) for seed in range(4)]))
    trainer.vllm_generation.close()
    wait_for_unloads(trainer)
    assert fused.state()["current"] == BASE
    assert fused.score(fused.base) == before


def test_a_server_that_was_restarted_is_given_the_active_version_again(
    fused: Fused, base_model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = grpo_trainer(
        fused.server.base_url, base_model, tmp_path, lora_sync_serving="fused", lora_sync_timeout=120.0
    )
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    fused.server.kill()
    fused.server.start()
    assert fused.state()["current"] == BASE

    rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in range(4)])

    assert is_policy_of(trainer.model, rows)
    assert "was given it again" in caplog.text
    trainer.vllm_generation.close()
    wait_for_unloads(trainer)


def test_every_worker_gets_its_shard(
    base_model: Path, reference: PeftReference, tmp_path: Path, answers: list[str | None]
) -> None:
    """Tensor parallel: heads split in two for q, k and v, rows for gate and up, columns for o and down."""
    server = VLLMServer(
        base_model,
        enable_lora=False,
        runtime_updating=False,
        extra_args=[
            *("--worker-extension-cls", WORKER),
            *("--middleware", MIDDLEWARE),
            *("--tensor-parallel-size", "2"),
            *("--distributed-executor-backend", "mp"),
        ],
        extra_env={"PYTHONPATH": str(ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        log_path=tmp_path / "log",
    )
    with server, shared_folder() as folder:
        store = AdapterStore(folder, pinned=PinnedFilePool())
        engine = Blocking(VLLMFusedEngine(server.base_url, is_local=True))
        engine.connect(soon(60))
        fused = Fused(server, engine, reference, store)
        before = fused.score(fused.base)
        # First, while nothing is known of the layer: each worker silently takes its rows of a weight that is too wide.
        wide = fused.write(3)
        change_file(wide, of_another_width)
        with pytest.raises(AdapterRejectedError, match="another base model"):
            engine.load(wide, soon(60))
        names = {seed: fused.load(seed) for seed in (1, 2)}
        for seed, name in names.items():
            assert fused.gap(fused.score(name), seed) < reference.tolerance
        assert fused.gap(fused.score(names[2]), 2) < reference.tolerance
        workers = fused.state()["workers"]
        assert [worker["active"] for worker in workers] == [names[2]] * 2
        assert len({json.dumps(worker["modules"]) for worker in workers}) == 1
        assert fused.score(fused.base) == before

        def announce(after: StoredAdapter) -> None:
            coming = store.after(after, fused.versions + 1)
            assert coming is not None
            assert engine.reserve(coming, soon(60))

        first = fused.write(1)
        engine.load(first, soon(60))
        announce(first)
        second = fused.write(2)
        engine.load(second, soon(60))
        assert json.loads(answers[-1] or "").keys() >= {first.name, second.name}
        right = fused.score(second.name)
        assert fused.gap(right, 2) < reference.tolerance
        announce(second)
        third = written_damaged(lambda: fused.write(3))
        with pytest.raises(AdapterNotVisibleError, match="checksum"):
            engine.load(third, soon(60))
        assert answers[-1] == ""
        assert fused.score(second.name) == right
        assert fused.score(fused.base) == before
        engine.close()
        store.close()
