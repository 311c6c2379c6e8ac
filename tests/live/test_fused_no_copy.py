"""Live tier: fused serving on a real vLLM server that keeps no copy of its base weights.

On a CPU vLLM packs its weights and computes with the packed form. Here a plugin of vLLM leaves them plain, as they are
on a GPU.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from conftest import FUSED_KEY
from contract.reference import PeftReference
from contract.served import soon
from support.adapters import with_tensors
from support.models import lora
from support.policies import token_ids
from support.trainers import grpo_trainer, steps_of, wait_for_unloads
from versus.scoring import prompt_logprobs
from vllm_server import VLLMServer

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore
from trl_lora_sync.engine_plugins.vllm_fused import BASE, MIDDLEWARE, ROUTE, WORKER
from trl_lora_sync.engine_plugins.vllm_fused_worker import PLACE_VARIABLE
from trl_lora_sync.engines.vllm.fused import VLLMFusedEngine
from trl_lora_sync.errors import AdapterRejectedError, ServerSetupError
from trl_lora_sync.runtime import Blocking

ROOT = Path(__file__).parents[2]
RIGHT = {"Authorization": f"Bearer {FUSED_KEY}"}
ASKED = token_ids(3, 100)
SYNCS = 50
PLUGIN = """
def leave_weights_plain():
    import vllm._custom_ops
    import vllm.model_executor.layers.utils as layers
    vllm._custom_ops._supports_onednn = False
    layers.check_cpu_sgl_kernel = lambda *_: False  # small weights on a CPU with AMX
"""


@pytest.fixture(autouse=True)
def _key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_API_KEY", FUSED_KEY)


def start(base_model: Path, folder: Path, *, is_plain: bool) -> VLLMServer:
    installed = folder / "plain_weights-1.dist-info"
    installed.mkdir()
    (folder / "plain_weights.py").write_text(PLUGIN)
    (installed / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-weights\nVersion: 1\n")
    (installed / "entry_points.txt").write_text("[vllm.general_plugins]\nplain = plain_weights:leave_weights_plain\n")
    path = f"{ROOT}:{folder}" if is_plain else str(ROOT)
    return VLLMServer(
        base_model,
        enable_lora=False,
        runtime_updating=False,
        api_key=FUSED_KEY,
        extra_args=["--enable-prefix-caching", "--worker-extension-cls", WORKER, "--middleware", MIDDLEWARE],
        extra_env={"PYTHONPATH": path, PLACE_VARIABLE: "none"},
        log_path=folder / "server.log",
    )


@pytest.fixture(scope="module")
def server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with start(base_model, tmp_path_factory.mktemp("server"), is_plain=True) as started:
        yield started


@pytest.fixture(scope="module")
def reference(base_model: Path) -> PeftReference:
    return PeftReference(base_model)


def state(server: VLLMServer) -> dict[str, Any]:
    url = f"{server.base_url}{ROUTE}?compare=base"
    found: dict[str, Any] = httpx.get(url, headers=RIGHT, timeout=60, trust_env=False).json()
    return found


def small(adapter: CanonicalAdapter, factor: float) -> CanonicalAdapter:
    """The adapter with so much smaller a change, as training makes it in a few steps."""
    return with_tensors(adapter, {n: one * factor if "lora_B" in n else one for n, one in adapter.tensors.items()})


def test_the_base_is_bit_identical_after_many_versions_without_a_copy_of_it(
    server: VLLMServer, reference: PeftReference, tmp_path: Path
) -> None:
    store = AdapterStore(tmp_path / "store")
    engine = Blocking(VLLMFusedEngine(server.base_url, is_local=True))
    engine.connect(soon(60))
    base = engine.capabilities.base_model
    before, name = prompt_logprobs(engine, base, ASKED, soon(60)), None
    for seed in range(SYNCS):
        adapter = reference.adapter(seed)
        stored = store.write(seed + 1, adapter)
        engine.load(stored, soon(60))
        if name is not None:
            engine.unload(name, soon(60))
        name = stored.name
        if seed % 10 == 0:
            found = prompt_logprobs(engine, name, ASKED, soon(60))
            expected = reference.logprobs(adapter, ASKED[:1], ASKED[1:])
            assert sum(abs(a - b) for a, b in zip(found, expected, strict=True)) / len(expected) < reference.tolerance
    assert {worker["base_copy"] for worker in state(server)["workers"]} == {"none"}

    stored = store.write(SYNCS + 1, small(reference.adapter(1), 0.002))
    engine.load(stored, soon(60))
    kept = sum(worker["base_copy_bytes"] for worker in state(server)["workers"])
    linears = sum(one.numel() * 2 for name, one in reference.base.named_parameters() if "_proj" in name)
    assert 0 < kept < 0.05 * linears

    for each in engine.loaded(soon()):
        if each.startswith(store.run_id):
            engine.unload(each, soon(60))
    found = state(server)
    assert (found["current"], found["broken"]) == (BASE, None)
    assert all(worker["different"] == 0 < worker["compared"] for worker in found["compared"])
    assert prompt_logprobs(engine, base, ASKED, soon(60)) == before
    assert all(worker["base_copy_bytes"] == 0 for worker in found["workers"])
    engine.close()
    store.close()


def test_a_run_trains_the_policy_that_it_samples_from(server: VLLMServer, base_model: Path, tmp_path: Path) -> None:
    trainer = grpo_trainer(server.base_url, base_model, tmp_path, lora_sync_serving="fused", max_steps=3)
    trainer.train()
    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3]
    assert all(step["sampling/sampling_logp_difference/mean"] < 0.02 for step in steps)
    trainer.vllm_generation.close()
    wait_for_unloads(trainer)
    found = state(server)
    assert (found["current"], found["broken"]) == (BASE, None)
    assert all(worker["different"] == 0 for worker in found["compared"])


def test_dora_is_refused_before_the_first_step(server: VLLMServer, base_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ServerSetupError, match=r"more than LoRA's two matrices.*TRL_LORA_SYNC_FUSED_BASE=none"):
        grpo_trainer(server.base_url, base_model, tmp_path, peft_config=lora(use_dora=True), lora_sync_serving="fused")
    assert state(server)["current"] == BASE


@pytest.mark.skipif(
    " avx512f " not in Path("/proc/cpuinfo").read_text(),
    # It does with oneDNN, which it has in its builds for CPUs with AVX-512 only (0.31).
    reason="vLLM packs no weights on a CPU without AVX-512",
)
def test_packed_weights_are_refused(base_model: Path, reference: PeftReference, tmp_path: Path) -> None:
    with start(base_model, tmp_path, is_plain=False) as server:
        store = AdapterStore(tmp_path / "store")
        engine = Blocking(VLLMFusedEngine(server.base_url, is_local=True))
        engine.connect(soon(60))
        with pytest.raises(AdapterRejectedError, match=r"packed form.*TRL_LORA_SYNC_FUSED_BASE=none"):
            engine.load(store.write(1, reference.adapter(1)), soon(60))
        engine.close()
        store.close()
