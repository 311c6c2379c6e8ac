"""The engines that there are, by name."""

from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.engines.vllm.spec import VLLM

ENGINES = {spec.name: spec for spec in (VLLM, SGLANG)}
