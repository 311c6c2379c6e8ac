"""What a contract test is given: a server, an engine that is connected to it, and the truth about its base model."""

from dataclasses import dataclass, replace

import torch

from contract.reference import Reference
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engines.base import Completion, Deadline, Engine, PromptGroup, Sampling
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.sglang.engine import SGLangEngine
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.runtime import Blocking, run
from trl_lora_sync.testing import FakeSGLang, Shapes

torch.set_num_threads(1)  # fakes share their cores with the trainer under test

SMALL = Shapes(hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=260)
MAX_LORA_RANK = 16
PROMPT = [10, 20, 30, 40, 50]
OTHER_PROMPT = [60, 70, 80]


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "the test")


def as_tensors(stored: StoredAdapter, adapter: CanonicalAdapter) -> StoredAdapter:
    """The same version, to be sent over HTTP."""
    return StoredAdapter(
        name=stored.name,
        version=stored.version,
        rank=stored.rank,
        target_modules=stored.target_modules,
        payload_bytes=stored.payload_bytes,
        content=adapter,
    )


@dataclass
class Served:
    """A server, an engine that is connected to it, and the truth about its base model.

    Attributes:
        fake: the server itself, if it is a fake.
    """

    engine: Engine
    reference: Reference
    store: AdapterStore
    fake: FakeSGLang | None = None
    versions: int = 0

    def write(self, adapter: CanonicalAdapter) -> StoredAdapter:
        self.versions += 1
        return self.store.write(self.versions, adapter)

    def load(self, seed: int) -> tuple[StoredAdapter, CanonicalAdapter]:
        """Write, load and warm up an adapter."""
        adapter = self.reference.adapter(seed)
        stored = self.write(adapter)
        self.engine.load(stored, soon())
        self.engine.warm_up(stored, soon())
        return stored, adapter

    def sample(self, model: str, count: int = 1, prompt: list[int] = PROMPT, **fields: object) -> list[Completion]:
        """Completions of one group, with sampling fields changed."""
        return self.engine.generate(model, [PromptGroup(prompt=prompt, count=count)], sampling(**fields), soon())[0]

    @property
    def base(self) -> str:
        return self.engine.capabilities.base_model


def engine_at(base_url: str, kind: str, *, connect: bool = True) -> Engine:
    if connect:
        engine, _, serving = kind.partition("-")
        deadline = soon(60)
        return Blocking(
            run(connect_engine(base_url, engine=engine, is_local=True, deadline=deadline, serving=serving or "runtime"))
        )
    return Blocking((SGLangEngine if kind == "sglang" else VLLMEngine)(base_url, is_local=True))


def sampling(**fields: object) -> Sampling:
    """Plain sampling with the sampled token's log-probability, with fields changed."""
    return replace(Sampling.unrestricted(max_tokens=6, logprobs=0), **fields)  # type: ignore[arg-type]
