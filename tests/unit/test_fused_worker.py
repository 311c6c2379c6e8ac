"""Unit tier: the servers and layers that fused serving refuses, and its messages; with layers that look like vLLM's."""

import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.engine_plugins import vllm_fused_worker as worker
from trl_lora_sync.engine_plugins.fused_placement import WeightSlice

from .tiny import IN, OUT, canonical, lora_module


def config(**changes: Any) -> Any:
    return SimpleNamespace(model_config=SimpleNamespace(**{"quantization": None} | changes))


def test_a_plain_server_is_taken() -> None:
    worker.check_server(config())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization": "fp8"}, r"quantised \(fp8\).*Serve the unquantised model"),
        ({"quantization": "bitsandbytes"}, r"quantised \(bitsandbytes\)"),
    ],
)
def test_a_server_whose_weights_cannot_be_replaced_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(worker.UnsuitableError, match=words):
        worker.check_server(config(**changes))


class FusedMoE(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.ones(2, 4, 4))


class LatentAttention(torch.nn.Module):
    """As vLLM's MLA: it holds the layer, and makes other matrices from it."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.kv_b_proj = layer

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        pass


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = torch.nn.Linear(4, 4)
        self.experts = FusedMoE()
        self.kv_b_proj = torch.nn.Linear(4, 4)
        self.attention = LatentAttention(self.kv_b_proj)


def test_a_linear_layer_is_taken() -> None:
    model = Model()
    worker.check_layer(model, "q_proj", {"q_proj": model.q_proj}, {})


def test_a_norm_and_a_bias_are_taken_and_those_with_another_form_are_not() -> None:
    model = Model()
    model.norm = torch.nn.LayerNorm(4)
    worker.check_layer(model, "norm", {}, {})
    worker.check_layer(model, "q_proj.bias", {"q_proj": model.q_proj}, {})
    model.norm.quant_method = LatentAttention(model.q_proj)
    with pytest.raises(worker.UnsuitableError, match="'norm', which is a LayerNorm and no unquantised"):
        worker.check_layer(model, "norm", {}, {})


def test_dora_is_refused_where_a_worker_has_a_part_of_each_row() -> None:
    fused = worker.FusedModel.__new__(worker.FusedModel)
    fused.pieces = {
        "q_proj": [WeightSlice("qkv_proj", (0, 4), (0, 8), 0, 0)],
        "o_proj": [WeightSlice("o_proj", (0, 8), (4, 8), 0, 0)],
    }
    shapes: dict[str, tuple[int, ...]] = {"q_proj": (8, 8), "o_proj": (8, 8)}
    fused.check_whole_rows(["q_proj"], shapes)
    with pytest.raises(worker.UnsuitableError, match=r"'o_proj' is trained with DoRA.*--tensor-parallel-size"):
        fused.check_whole_rows(["q_proj", "o_proj"], shapes)


def test_experts_without_plain_weights_are_refused_by_name() -> None:
    with pytest.raises(worker.UnsuitableError, match=r"'experts\.w13_weight', which is a FusedMoE.*target_modules"):
        worker.check_layer(Model(), "experts.w13_weight", {}, {})


class UnquantizedFusedMoEMethod:
    def __init__(self, backend: str) -> None:
        self.unquantized_backend = SimpleNamespace(name=backend)


@pytest.mark.parametrize("backend", ["TRITON", "CPU", "FLASHINFER_CUTLASS", "AITER"])
def test_experts_are_taken_with_kernels_that_keep_the_order_of_their_weights(backend: str) -> None:
    model = Model()
    model.experts.quant_method = UnquantizedFusedMoEMethod(backend)  # type: ignore[assignment]
    experts = worker.experts_of(model)
    assert experts == {"experts.w13_weight": model.experts}
    if backend in ("TRITON", "CPU"):
        worker.check_layer(model, "experts.w13_weight", {}, experts)
    else:
        with pytest.raises(worker.UnsuitableError, match=rf"\({backend}\).*--moe-backend triton"):
            worker.check_layer(model, "experts.w13_weight", {}, experts)


def test_a_layer_that_is_kept_in_another_form_as_well_is_refused() -> None:
    model = Model()
    with pytest.raises(worker.UnsuitableError, match=r"LatentAttention \('attention'\) also keeps"):
        worker.check_layer(model, "kv_b_proj", {"kv_b_proj": model.kv_b_proj}, {})


def test_what_goes_wrong_in_a_worker_is_an_answer() -> None:
    def fail() -> dict[str, Any]:
        raise torch.OutOfMemoryError("CUDA out of memory")

    answer = worker.answered(fail)
    assert (answer["ok"], answer["status"], answer["error"]) == (False, 500, "OutOfMemoryError: CUDA out of memory")


def test_a_worker_of_a_wrong_server_says_so_each_time() -> None:
    extended = type("Worker", (worker.FusedWorker,), {})()
    extended.vllm_config = config(quantization="fp8")
    extended.get_model = Model
    for _ in range(2):
        answer = extended.lora_sync_prepare("a", "/a")
        assert (answer["ok"], answer["status"]) == (False, 422)


class Joined(torch.nn.Linear):
    """A linear layer of vLLM whose weight has the rows of q and of k."""

    quant_method = object()


class JoinedModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk = Joined(IN, 2 * OUT, bias=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            start = {"q.weight": 0, "k.weight": OUT}[name]
            self.qk.weight.data[start : start + OUT].copy_(weight)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """A worker with that model; adapters for q and for k are in `tmp_path`."""
    layers = "vllm.model_executor.layers"
    monkeypatch.setitem(
        sys.modules, f"{layers}.linear", SimpleNamespace(LinearBase=Joined, UnquantizedLinearMethod=object)
    )
    monkeypatch.setitem(
        sys.modules,
        f"{layers}.vocab_parallel_embedding",
        SimpleNamespace(UnquantizedEmbeddingMethod=object, VocabParallelEmbedding=torch.nn.Embedding),
    )
    extended = type("Worker", (worker.FusedWorker,), {})()
    extended.vllm_config, model = config(), JoinedModel()
    extended.vllm_config.model_config.dtype = torch.float32
    extended.get_model = lambda: model
    for name in "qk":
        write_adapter(tmp_path / name, canonical([lora_module(name)]))
    return extended


def test_copy_of_the_base_is_reported_where_it_is_after_an_adapter_that_needs_no_further_copy(
    joined: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state had "host", although the copy was on the GPU."""
    copies_of = worker.copies_of

    def copies_on_gpu(weights: Iterable[torch.Tensor], place: str) -> tuple[list[torch.Tensor], str]:
        copies, kept_in = copies_of(weights, place)
        return copies, "gpu" if copies else kept_in

    monkeypatch.setattr(worker, "copies_of", copies_on_gpu)
    for name in "qk":
        assert joined.lora_sync_prepare(name, str(tmp_path / name))["ok"]
        assert joined.lora_sync_state()["base_copy"] == "gpu"
        assert joined.lora_sync_state()["dtype"] == "F32"


@pytest.mark.parametrize("is_applied", [False, True])
def test_modules_of_a_change_that_was_undone_are_looked_at_again(joined: Any, tmp_path: Path, is_applied: bool) -> None:
    """Whether they have a place on any worker is known only once all have answered."""

    def prepare(name: str) -> set[str]:
        answer = joined.lora_sync_prepare(name, str(tmp_path / name))
        assert answer["ok"]
        return set(answer["placed"])

    before = joined.get_model().qk.weight.clone()
    assert prepare("q") == {"q"}
    if is_applied:
        assert joined.lora_sync_apply("q")["ok"]
        assert not torch.equal(joined.get_model().qk.weight, before)
    assert joined.lora_sync_undo()["ok"]
    assert torch.equal(joined.get_model().qk.weight, before)
    assert prepare("q") == {"q"}
    assert joined.lora_sync_apply("q")["ok"]
    assert prepare("k") == {"k"}
    assert joined.lora_sync_apply("k")["ok"]
    assert prepare("q") == set()
