"""The trainer's side: one model with one LoRA adapter, whose values change from sync to sync as in training."""

import contextlib
import gc
import json
import random
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from make_model import make_tokenizer
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from trl_lora_sync.engines.base import PromptGroup
from versus.shapes import original

# With it, the product of the two matrices is about a twentieth of the base's weights, as after some training.
_STD_OF_B = 0.01


@dataclass(kw_only=True)
class BaseDrift:
    """How far the trainer's base weights are from the checkpoint that they were loaded from.

    Attributes:
        changed_share: share of the weights whose bits differ.
        max_abs: the largest difference.
    """

    changed_share: float = 0.0
    max_abs: float = 0.0

    @property
    def is_bit_identical(self) -> bool:
        return self.changed_share == 0.0


class Workbench:
    """The trainer's model and what changes or looks at it.

    Args:
        folder: the checkpoint.
        device: `"cuda"` or `"cpu"`.
    """

    def __init__(self, folder: Path, device: str) -> None:
        self.folder = folder
        self.device = device
        self.tokenizer = make_tokenizer()
        self.accelerator = self._new_accelerator()
        target = {"": 0} if device == "cuda" else None
        self._base: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, device_map=target)
        self._model: PeftModel | None = None
        self._random = random.Random(0)
        self._generator = torch.Generator(device).manual_seed(0)

    @property
    def model(self) -> PeftModel:
        assert self._model is not None, "use_rank() comes first"
        return self._model

    @property
    def is_on_gpu(self) -> bool:
        return self.device == "cuda"

    def _new_accelerator(self) -> Accelerator:
        return Accelerator(cpu=self.device == "cpu", mixed_precision="bf16" if self.is_on_gpu else "no")

    def renew_accelerator(self) -> None:
        """After a trainer has reset the state that all accelerators share."""
        self.accelerator = self._new_accelerator()

    def give_back_memory(self) -> None:
        """Free unreferenced memory, for servers on the same GPU."""
        gc.collect()
        if self.is_on_gpu:
            torch.cuda.empty_cache()

    def use_rank(self, rank: int) -> None:
        """Replace the adapter by one of another rank on all linear layers; PEFT makes it float32."""
        if self._model is not None:
            self._base = self._model.unload()
        config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
        with torch.device(self.device):  # initialised where it is used
            self._model = get_peft_model(self._base, config)
        self.change_adapter()

    @torch.no_grad()
    def change_adapter(self, std: float | None = None) -> None:
        """New values in every `lora_B`, of the size that an adapter has after some training, or of `std`."""
        rank = self.model.peft_config["default"].r
        std = _STD_OF_B * (32 / rank) ** 0.5 if std is None else std
        for name, parameter in self.model.named_parameters():
            if "lora_B" in name:
                parameter.zero_() if std == 0 else parameter.normal_(0.0, std, generator=self._generator)
        self.settle()

    def settle_compute(self) -> None:
        """Wait until the GPU has done what training would wait for."""
        if self.is_on_gpu:
            torch.cuda.current_stream().synchronize()

    def settle(self) -> None:
        """Wait until the GPU has done what it was given."""
        if self.is_on_gpu:
            torch.cuda.synchronize()

    def prompts(self, count: int, tokens: int) -> list[PromptGroup]:
        """Random prompts that no server has seen."""
        vocabulary = self.model.config.vocab_size
        return [
            PromptGroup(prompt=[self._random.randrange(vocabulary) for _ in range(tokens)], count=1)
            for _ in range(count)
        ]

    @contextlib.contextmanager
    def watched_memory(self) -> Iterator[dict[str, int]]:
        """In bytes, once the block has ended: what it took of the GPU above what was held, and the process's size."""
        seen: dict[str, int] = {}
        if self.is_on_gpu:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        yield seen
        seen["trainer_rss_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        if self.is_on_gpu:
            seen["trainer_held_bytes"] = held
            seen["trainer_rise_bytes"] = torch.cuda.max_memory_allocated() - held

    @torch.no_grad()
    def base_drift(self) -> BaseDrift:
        """Compare every base weight with the checkpoint's, bit by bit, and put those back.

        The weights are generated again: reading 64 GB takes minutes of a lent machine.

        Raises:
            RuntimeError: the model and the checkpoint do not have the same weights by name.
        """
        ours = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter.data
            for name, parameter in self.model.named_parameters()
            if "lora_" not in name
        }
        in_checkpoint = json.loads((self.folder / "model.safetensors.index.json").read_text())["weight_map"]
        if odd := ours.keys() ^ in_checkpoint.keys():
            raise RuntimeError(f"only one of the model and its checkpoint has {', '.join(sorted(odd))}")
        drift, changed, total = BaseDrift(), 0, 0
        for name, found in ours.items():
            made = original(name, found.shape, self.device)
            total += found.numel()
            if count := int((found.view(torch.int16) != made.view(torch.int16)).sum()):
                changed += count
                drift.max_abs = max(drift.max_abs, float((found - made).abs().max()))
                found.copy_(made)
        drift.changed_share = changed / total
        return drift
