"""Unit tier: what is refused of a sharded model before it is read. How shards are read is shown by the launchers."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trl_lora_sync import shards
from trl_lora_sync.errors import UnsupportedSettingError

CPU = torch.device("cpu")


@pytest.fixture
def model() -> Iterator[nn.Module]:
    """A 4-bit layer whose packed words FSDP2 has sharded as bfloat16, over a group of one."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        layer = nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
        sharded = distribute_tensor(layer.weight.detach(), init_device_mesh("cpu", (1,)), [Shard(0)])
        layer.weight = nn.Parameter(sharded, requires_grad=False)
        layer.quant_state = object()
        yield nn.Sequential(layer)
    finally:
        torch.distributed.destroy_process_group()


def test_a_4_bit_base_that_gathering_would_change_is_refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where the copy goes by way of float32, which has one pattern for what is no number."""

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
