"""What a server must answer, computed apart from it: by the fake's own formula, or by PEFT on the real weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.testing import MODULES, FakeSGLang, InMemoryEngine, Shapes, random_adapter


class Reference(Protocol):
    """The base model of one server, and what adapters make of it.

    Attributes:
        tolerance: mean absolute difference of log-probabilities that the server's number format explains.
        vocab: number of tokens.
    """

    tolerance: float
    vocab: int

    def adapter(self, seed: int, *, rank: int = 8, modules: Sequence[str] = MODULES) -> CanonicalAdapter:
        """An adapter that fits the base model and moves it clearly."""

    def logprobs(
        self,
        adapter: CanonicalAdapter | None,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        """Log-probability of each completion token; of the base for None."""


class FakeReference:
    """The formula of a fake server or of an engine in memory, which knows nothing of what was loaded there."""

    tolerance = 1e-4

    def __init__(self, fake: FakeSGLang | InMemoryEngine) -> None:
        self._fake = fake
        self.vocab = fake.args.shapes.vocab

    def adapter(self, seed: int, *, rank: int = 8, modules: Sequence[str] = MODULES) -> CanonicalAdapter:
        return random_adapter(self._fake.args.shapes, seed, rank=rank, modules=modules)

    def logprobs(
        self,
        adapter: CanonicalAdapter | None,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        return self._fake.expected_logprobs(adapter, prompt_ids, completion_ids, temperature)


class PeftReference:
    """PEFT on the base model that a real server serves, on the CPU or a GPU."""

    def __init__(self, model: str | Path) -> None:
        from transformers import AutoModelForCausalLM

        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self.base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(self._device)
        self.vocab = int(self.base.config.vocab_size)
        self._shapes = Shapes.of_config(self.base.config)
        # bfloat16 on the server rounds in every layer. Seen: 0.007 to 0.035 with 2 layers, up to 0.177 with
        # 28 layers (SGLang 0.5.15 on an H100), where adapters move the policy by more than 1.
        self.tolerance = max(0.06, 0.04 * self._shapes.layers**0.5)

    def adapter(self, seed: int, *, rank: int = 8, modules: Sequence[str] = MODULES) -> CanonicalAdapter:
        return random_adapter(self._shapes, seed, rank=rank, modules=modules)

    def logprobs(
        self,
        adapter: CanonicalAdapter | None,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        temperature: float = 1.0,
    ) -> list[float]:
        from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

        model: Any = self.base
        if adapter is not None:
            config = LoraConfig(
                r=adapter.rank, lora_alpha=adapter.rank, target_modules=list(adapter.target_modules), bias="none"
            )
            model = get_peft_model(self.base, config)
            set_peft_model_state_dict(model, adapter.tensors)
        try:
            ids = torch.tensor([[*prompt_ids, *completion_ids]], device=self._device)
            with torch.no_grad():
                rows = (model(input_ids=ids).logits[0].float() / temperature).log_softmax(-1)
        finally:
            if adapter is not None:
                self.base = model.unload()
        rows = rows[len(prompt_ids) - 1 : -1]
        return [float(row[token]) for row, token in zip(rows, completion_ids, strict=True)]
