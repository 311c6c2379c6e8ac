"""What the `/metrics` page of a vLLM server shows about its set-up and its load; no key guards it (0.22 to 0.33).

A server that runs with --disable-log-stats has the page without any of these lines.
"""

import math
import re
from dataclasses import dataclass

ROUTE = "/metrics"
_SAMPLE = re.compile(r"^(vllm:\w+)\{(.*)\} (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
# Source: vllm/platforms/cpu.py `check_and_update_config`, which raises the default of 16 to this.
_CPU_BLOCK_SIZE = "128"


@dataclass(frozen=True, kw_only=True)
class VLLMMetrics:
    """One reading of the page.

    Attributes:
        is_told: whether the engine's metrics are on it at all.
        has_lora: whether the server was started with --enable-lora.
        is_cpu_build: whether it computes on a CPU; None if unknown.
        max_loras: how many adapters one batch can have; None if unknown.
        adapters_ran_at: when a request for an adapter last ran or waited, on the server's clock; infinity while one
            does, and 0 if none ever did.
        replicas: how many engines are behind it, with --data-parallel-size; 0 if unknown.
    """

    is_told: bool
    has_lora: bool
    is_cpu_build: bool | None
    max_loras: int | None
    adapters_ran_at: float
    replicas: int


def read_metrics(page: str) -> VLLMMetrics:
    """Read the part of Prometheus's text format that vLLM uses."""
    samples = [(name, dict(_LABEL.findall(labels)), float(value)) for name, labels, value in _SAMPLE.findall(page)]
    cache = next((labels for name, labels, _ in samples if name == "vllm:cache_config_info"), {})
    # Each combination of adapters is one sample, whose value is when the engine last ran with it.
    used = [(value, labels) for name, labels, value in samples if name == "vllm:lora_requests_info"]
    now = max(used, key=lambda one: one[0], default=(0.0, {}))[1]
    is_busy = any(value > 0 for name, _, value in samples if name in _REQUESTS)
    ran_at = max((value for value, labels in used if _names_adapter(labels)), default=0.0)
    return VLLMMetrics(
        is_told="vllm:num_requests_running" in page,
        # By its name, as there are no samples before the first request. vLLM has this metric with --enable-lora only
        # (vllm/v1/metrics/loggers.py, 0.26 and 0.31).
        has_lora="vllm:lora_requests_info" in page,
        is_cpu_build=_is_cpu_build(cache),
        max_loras=next((int(labels["max_lora"]) for _, labels in used if labels.get("max_lora", "").isdecimal()), None),
        # The last sample stays when the engine has nothing more to do.
        adapters_ran_at=math.inf if is_busy and _names_adapter(now) else ran_at,
        replicas=len({labels.get("engine") for name, labels, _ in samples if name in _REQUESTS}),
    )


def _names_adapter(labels: dict[str, str]) -> bool:
    return bool(labels.get("running_lora_adapters") or labels.get("waiting_lora_adapters"))


def _is_cpu_build(cache: dict[str, str]) -> bool | None:
    """Known from the block size, which has another default on a CPU; a GPU's default is 16 for nearly all models."""
    if "cpu_kvcache_space_bytes" in cache:  # read only on a CPU, and None elsewhere, in the versions that show it
        return cache["cpu_kvcache_space_bytes"] != "None"
    if "block_size" not in cache or cache.get("user_specified_block_size") == "True":
        return None
    return cache["block_size"] == _CPU_BLOCK_SIZE
