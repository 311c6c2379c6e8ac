"""Unit tier: that a model is sharded is seen, and some are refused. How shards are read is shown by the launchers."""

from collections.abc import Iterator

import pytest
import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from trl_lora_sync.collective import shards
from trl_lora_sync.errors import UnsupportedSettingError
from trl_lora_sync.generation.base import AdapterGeneration
from trl_lora_sync.settings import PolicySettings
from unit.tiny import base_model, lora_model

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """A group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        torch.distributed.destroy_process_group()


@pytest.fixture
def model(mesh: DeviceMesh) -> nn.Module:
    """A 4-bit layer whose packed words FSDP2 has sharded as bfloat16."""
    layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    sharded = distribute_tensor(layer.weight.detach(), mesh, [Shard(0)])
    layer.weight = nn.Parameter(sharded, requires_grad=False)
    layer.quant_state = object()
    return nn.Sequential(layer)


def test_a_4_bit_base_that_gathering_would_change_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the copy goes by way of float32, which has one pattern for NaN."""

    def copies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(torch.where(source.isnan(), torch.nan, source.float()))

    monkeypatch.setattr(torch, "_foreach_copy_", copies)
    shards.copies_bits.cache_clear()
    try:
        with pytest.raises(UnsupportedSettingError, match=r"4-bit base as bfloat16.*Leave out bnb_4bit_quant_storage"):
            shards.check_quantised(model, CPU)
    finally:
        shards.copies_bits.cache_clear()


def test_a_4_bit_base_is_taken_where_a_copy_keeps_all_bits(model: nn.Module) -> None:
    assert shards.copies_bits(CPU, torch.bfloat16)
    shards.check_quantised(model, CPU)


def test_other_sharded_layers_are_taken_in_any_case(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shards, "copies_bits", lambda device, dtype: False)
    del model[0].quant_state
    shards.check_quantised(model, CPU)


class WithoutServers(AdapterGeneration):
    """Reads the model and samples nowhere."""

    def _init_vllm(self) -> None:
        """Connect to nothing."""


def test_a_model_that_is_sharded_after_a_teacher_was_wrapped_is_read_whole(mesh: DeviceMesh) -> None:
    """One model was wrapped before training, the teacher, and one in it, so the student passed for unsharded."""
    student, accelerator = lora_model(), Accelerator(cpu=True)
    accelerator.prepare_model(base_model(seed=7), evaluation_mode=True)  # the teacher
    generation = WithoutServers(
        student, accelerator, None, settings=PolicySettings(dtype=None), on_sync=lambda report: None
    )
    whole = generation.adapter_state_dict()

    # As at the start of `train`.
    accelerator.free_memory()
    accelerator.prepare_model(fully_shard(student, mesh=mesh), device_placement=False, evaluation_mode=True)

    read = generation.adapter_state_dict()
    assert {name: type(value) for name, value in read.items()} == dict.fromkeys(whole, torch.Tensor)
    assert all(torch.equal(read[name], value) for name, value in whole.items())
