"""Test your own code against adapter sync without a GPU and without an engine.

`serving_sglang` runs an HTTP server that obeys SGLang's rules, on a real socket, and can serve a small model that is
trained. `in_memory_engines` has engines in this process instead, which open no connection. Both compute on the CPU.
"""

from trl_lora_sync.testing.in_memory import InMemoryEngine, in_memory_engines
from trl_lora_sync.testing.policy import (
    MODULES,
    ModelPolicy,
    ServedPolicy,
    Shapes,
    ToyPolicy,
    random_adapter,
)
from trl_lora_sync.testing.serving import serving_sglang
from trl_lora_sync.testing.sglang import VERSIONS, FakeSGLang
from trl_lora_sync.testing.sglang_scheduler import ServerArgs

__all__ = [
    "MODULES",
    "VERSIONS",
    "FakeSGLang",
    "InMemoryEngine",
    "ModelPolicy",
    "ServedPolicy",
    "ServerArgs",
    "Shapes",
    "ToyPolicy",
    "in_memory_engines",
    "random_adapter",
    "serving_sglang",
]
