"""What only a GPU can show of the fast export: pinned files that it copies into. Skipped without one."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from peft.tuners.lora import LoraLayer
from safetensors.torch import save
from support.shared_memory import shared_folder
from torch import Tensor

from trl_lora_sync.adapter.canonical import LoRAModule
from trl_lora_sync.adapter.export import AdapterReader, collect_modules, read_adapter
from trl_lora_sync.adapter.fingerprint import chunks_of, fingerprint
from trl_lora_sync.adapter.flat import FlatBuffer
from trl_lora_sync.adapter.pinned_files import PinnedFile, PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engine_plugins.cuda_ipc import CUDADriver, IPCError
from trl_lora_sync.engine_plugins.pinned_memory import PinError, begin_copy_to_host, copy_now, pin
from trl_lora_sync.engine_plugins.repeated import Repeated
from trl_lora_sync.errors import AdapterNotFiniteError
from unit.tiny import lora_model, lora_module, randomize_adapters, reference_tensors

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]
GPU = torch.device("cuda", 0)
TENSORS = "adapter_model.safetensors"


@pytest.fixture
def folder() -> Iterator[Path]:
    with shared_folder() as folder:
        yield folder


def on_gpu(modules: list[LoRAModule], dtype: torch.dtype) -> list[LoRAModule]:
    return [
        LoRAModule(
            name=module.name,
            lora_A=module.lora_A.to(GPU, dtype),
            lora_B=module.lora_B.to(GPU, dtype),
            scaling=module.scaling,
        )
        for module in modules
    ]


def no_driver(device: torch.device) -> CUDADriver:
    raise IPCError("refused")


@pytest.mark.parametrize("is_beside", [False, True], ids=["at once", "beside the load"])
@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_version_from_a_gpu_is_byte_for_byte_that_of_the_library(
    dtype: torch.dtype, trained_in: torch.dtype, is_beside: bool, folder: Path
) -> None:
    model = lora_model(target_modules="all-linear", rank_pattern={"v_proj": 5, "down_proj": 1}).to(GPU)
    buffer, pool = FlatBuffer(), PinnedFilePool(driver_for=no_driver, shares_gpu=is_beside)
    store, live = AdapterStore(folder / "root", pinned=pool), list[StoredAdapter]()
    try:
        inodes = []
        for version in range(1, 13):
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.data.normal_(std=0.3)
            modules = on_gpu(collect_modules(model, "default"), trained_in)
            live.append(store.write(version, buffer.export(modules, dtype=dtype)))
            store.finish()
            file = live[-1].path / TENSORS
            expected = {key: tensor.cpu() for key, tensor in reference_tensors(modules, dtype).items()}
            assert file.read_bytes() == save(expected, metadata={"format": "pt"})
            inodes.append(file.stat().st_ino)
            while len(live) > 3:
                store.delete(live.pop(0))
        assert len(set(inodes)) == 4, "the files were not written again"
    finally:
        store.close()


@pytest.mark.outside  # Triton runs a compiler
@pytest.mark.parametrize("trained_in", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_launch_rounds_every_number_as_torch_does(dtype: torch.dtype, trained_in: torch.dtype) -> None:
    from trl_lora_sync.adapter.kernels import Copy, Export

    every = torch.arange(-(1 << 31), 1 << 31, 4099).to(torch.int32).view(torch.float32)
    numbers = every[every.isfinite()]
    sources = [numbers[: len(numbers) // 8 * 8].to(GPU, trained_in), torch.ones(8, device=GPU, dtype=trained_in)]
    copies = [Copy(torch.empty_like(one, dtype=dtype), one, 0.3) for one in sources]
    launch = Export(copies)
    assert launch.suits()
    is_finite = bool(launch.run())
    expected = [torch._foreach_mul([one.float()], [0.3])[0].to(dtype) for one in sources]
    for copy, right in zip(copies, expected, strict=True):
        assert torch.equal(copy.target.view(torch.uint8), right.view(torch.uint8))
    assert is_finite is bool(torch.stack([one.isfinite().all() for one in expected]).all())


@pytest.mark.outside
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fingerprint_in_one_launch_is_that_of_torch(dtype: torch.dtype) -> None:
    from trl_lora_sync.adapter.kernels import Fingerprint

    # Of several chunks, in some of which a tensor begins within a row, and the last row is not full.
    sizes = [8, 4096, 4104, 0, 20_000, 9_000_008, 16, 8_500_000, 1000]
    tensors = [torch.randn(size, device=GPU).to(dtype) for size in sizes]
    launch = Fingerprint([*chunks_of(tensors)])
    assert launch.suits()
    assert tuple(launch.run().tolist()) == fingerprint(tensors)
    for one in tensors:
        one.data = one.clone().neg_()
    assert tuple(launch.run().tolist()) == fingerprint(tensors)
    assert not Fingerprint([[torch.ones(9, device=GPU)[1:]]]).suits()


def test_trainer_on_a_gpu_reads_into_the_buffer(folder: Path) -> None:
    model = lora_model().to(GPU)
    randomize_adapters(model.cpu())
    model.to(GPU)
    reader = AdapterReader()
    reader.linears(model)
    adapter = reader.read(model, dtype=torch.bfloat16)
    assert adapter.flat.device == GPU
    plain = read_adapter(model.cpu(), dtype=torch.bfloat16)
    assert all(torch.equal(plain.tensors[key], tensor) for key, tensor in adapter.on_host().tensors.items())


def test_values_that_are_not_finite_are_refused_with_the_name_of_the_module() -> None:
    modules = on_gpu([lora_module("a"), lora_module("b", scaling=float("inf"))], torch.float32)
    with pytest.raises(AdapterNotFiniteError, match="'b', scaled by inf"):
        FlatBuffer().export(modules, dtype=torch.bfloat16)


def test_pinned_file_is_page_locked_until_it_is_discarded(folder: Path) -> None:
    """CUDA refuses to lock memory twice, so a refusal means that it is locked."""
    pinned = PinnedFile(folder / "pinned", 1 << 20, GPU)
    assert pinned.memory.is_pinned()
    with pytest.raises(PinError, match="already"):
        pin(pinned.memory, GPU)
    address = pinned.memory.data_ptr()
    pinned.discard()
    again = PinnedFile(folder / "pinned", 1 << 20, GPU)  # often at the same address
    assert again.memory.is_pinned(), address
    again.discard()


def test_refused_page_lock_leaves_no_error_behind(folder: Path) -> None:
    """The next kernel of the training reported it as its own."""
    pinned = PinnedFile(folder / "pinned", 1 << 20, GPU)
    with pytest.raises(PinError):
        pin(pinned.memory, GPU)
    assert torch.ones(8, device=GPU).sum().item() == 8
    torch.cuda.synchronize()
    pinned.discard()


@pytest.mark.parametrize("copy", [copy_now, lambda target, source: begin_copy_to_host(target, source, lambda: None)()])
def test_copy_is_done_when_it_returns(copy: Callable[[Tensor, Tensor], None], folder: Path) -> None:
    source = torch.randn(1 << 24, device=GPU)
    pinned = PinnedFile(folder / "pinned", source.numel() * 4, GPU)
    target = pinned.memory.view(torch.float32)
    for _ in range(5):
        source.normal_()
        copy(target, source)
        seen = target.clone()
        assert torch.equal(seen, source.cpu())
    del target
    pinned.discard()


def test_export_takes_the_memory_of_one_adapter_and_bounded_scratch() -> None:
    modules = [
        LoRAModule(
            name=f"layer.{number}",
            lora_A=torch.randn(64, 4096, device=GPU),
            lora_B=torch.randn(4096, 64, device=GPU),
            scaling=2.0,
        )
        for number in range(200)
    ]
    buffer = FlatBuffer()
    before = torch.cuda.memory_allocated(GPU)
    torch.cuda.reset_peak_memory_stats(GPU)
    adapter = buffer.export(modules, dtype=torch.bfloat16)
    kept = torch.cuda.memory_allocated(GPU) - before
    peak = torch.cuda.max_memory_allocated(GPU) - before
    assert adapter.payload_bytes <= kept <= adapter.payload_bytes + (2 << 20)
    assert peak <= kept + (72 << 20)


class Trained:
    """A model whose adapter is read again and again, as a run does."""

    def __init__(self, **lora: Any) -> None:
        self.model = lora_model(target_modules="all-linear", **lora or {"rank_pattern": {"v_proj": 5}}).to(GPU)
        self.reader = AdapterReader()

    def train(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                parameter.data.normal_(std=0.3)

    def read(self) -> dict[str, torch.Tensor]:
        self.reader.linears(self.model)
        return self.reader.read(self.model, dtype=torch.bfloat16).on_host().tensors

    def check(self) -> None:
        """Compare what a run reads with what is read once."""
        found, expected = self.read(), read_adapter(self.model, dtype=torch.bfloat16).on_host().tensors
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in expected.items())
        weights = [linear.weight for linear in self.reader.last_linears]
        assert tuple(self.reader.fingerprints.of(weights).tolist()) == fingerprint(weights)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The graphs that were launched."""
    found: list[object] = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (found.append(graph), replay(graph)))
    return found


def test_repeated_reads_follow_the_training(launches: list[object]) -> None:
    trained = Trained()
    for _ in range(5):
        trained.train()
        trained.check()
    # Of the adapter from the second time on, and of its fingerprint from the third.
    assert len(launches) == 7
    assert len(set(map(id, launches))) == 2


@pytest.mark.outside  # Triton runs a compiler
def test_reads_and_fingerprints_of_a_trained_adapter_need_one_launch_each(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "_foreach_copy_", count := Mock(wraps=torch._foreach_copy_))
    trained = Trained(r=8)
    with caplog.at_level("INFO"):
        trained.read()
        compared = count.call_count
        for _ in range(4):
            trained.train()
            trained.read()
            trained.reader.fingerprints.of([linear.weight for linear in trained.reader.last_linears])
    assert count.call_count == compared
    assert "without Triton" not in caplog.text


def test_repeated_reads_follow_matrices_that_move_and_scalings_that_change(launches: list[object]) -> None:
    trained = Trained()

    def read_thrice() -> None:
        for _ in range(3):
            trained.train()
            trained.check()

    read_thrice()
    for parameter in trained.model.parameters():
        parameter.data = parameter.data.clone()
    read_thrice()
    trained.model.cpu().to(GPU)
    read_thrice()
    for layer in trained.model.modules():
        if isinstance(layer, LoraLayer):
            layer.scaling["default"] *= 3
    read_thrice()
    # Two at first, two after the matrices moved, one with other scalings. From the host, they may come back to the same
    # memory.
    assert len(set(map(id, launches))) >= 5, "no launch was recorded again"


def test_repeated_reads_refuse_what_is_not_finite() -> None:
    trained = Trained()
    for _ in range(3):
        trained.train()
        trained.read()
    weight = trained.reader.last_linears[1].weight
    weight.data[0, 0] = float("nan")
    with pytest.raises(AdapterNotFiniteError):
        trained.read()
    weight.data[0, 0] = 1.0
    trained.check()


def test_work_that_cannot_be_recorded_is_done_in_the_usual_way(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Where vLLM is imported, its logger, the parent of ours, keeps all records to itself.
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    values = torch.ones(8, device=GPU)
    repeated = Repeated([values], lambda: torch.tensor(float(values.sum())))  # waits for the device
    with caplog.at_level("INFO", logger="vllm.trl_lora_sync"):
        found = [float(repeated.run()) for _ in range(3)]
        values.fill_(2)
        found.append(float(repeated.run()))
    assert found == [8.0, 8.0, 8.0, 16.0]
    assert [record.message for record in caplog.records if "cannot be recorded" in record.message]


def test_attempt_to_record_leaves_random_numbers_and_the_cache_as_they_were() -> None:
    torch.manual_seed(1)
    expected = torch.randn(4, device=GPU), torch.randn(4, device=GPU)
    torch.manual_seed(1)
    first = torch.randn(4, device=GPU)
    values = torch.ones(8, device=GPU)
    repeated = Repeated([values], lambda: torch.tensor(float(values.sum())))
    repeated.run()
    repeated.run()
    assert torch.equal(first, expected[0])
    assert torch.equal(torch.randn(4, device=GPU), expected[1])
    large = torch.empty(1 << 30, dtype=torch.uint8, device=GPU)
    reserved = torch.cuda.memory_reserved(GPU)
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(GPU) <= reserved - (1 << 30)
