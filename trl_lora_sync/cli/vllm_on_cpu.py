"""What vLLM needs on a CPU that it shares with the trainer. Run on vLLM 0.31.0 and 0.32.0."""

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

from trl_lora_sync.cli.launch import EngineArguments

# By default vLLM wants 0.92 of the host's memory, and ends if that is not free (vllm/v1/worker/cpu_worker.py).
_KV_CACHE_GIB = 2
# With one head for keys and values to each for queries, 512 x 3 x 512 elements.
_TINY_HIDDEN_SIZE = 512
# Replaces the size above; what is given in it also wins over --kv-cache-memory-bytes (vllm/platforms/cpu.py).
_KV_CACHE_VARIABLE = "VLLM_CPU_KVCACHE_SPACE"

# Compilation takes longer than it saves, and with LoRA vLLM skips it anyway. One process loads faster than two.
ONE_PROCESS_FLAGS: Mapping[str, str | None] = {"--enforce-eager": None, "--distributed-executor-backend": "uni"}
ONE_PROCESS_ENV = {
    # Otherwise the CPU platform turns the "uni" executor back into "mp".
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # vLLM binds its worker to the first core that it finds; two servers, or a trainer, would then share that one.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The trainer and other servers need the cores that idle OpenMP threads would otherwise spin on.
    "OMP_WAIT_POLICY": "PASSIVE",
}
_PARALLEL = (
    ("--tensor-parallel-size", "-tp"),
    ("--pipeline-parallel-size", "-pp"),
    ("--data-parallel-size", "-dp"),
)


def cpu_flags(given: EngineArguments, environ: Mapping[str, str], model: str) -> dict[str, str | None]:
    """Flags that let vLLM start beside other processes, and serve a tiny `model`."""
    flags: dict[str, str | None] = {"--enforce-eager": None}
    if _is_one_process(given):
        flags |= ONE_PROCESS_FLAGS
    if not (given.has("--kv-cache-memory-bytes", "--gpu-memory-utilization") or environ.get(_KV_CACHE_VARIABLE)):
        flags["--kv-cache-memory-bytes"] = str(_KV_CACHE_GIB * 1024**3)
    if not given.has("--dtype") and has_amx() and _is_tiny(model):
        flags["--dtype"] = "float32"
    flags["--max-model-len"] = "auto"  # as long as the cache holds; vLLM ends if the model's own length does not fit
    return flags


def cpu_env(given: EngineArguments, environ: Mapping[str, str]) -> dict[str, str]:
    """Variables beside the flags; variables that are set already stay."""
    if not _is_one_process(given):
        return {}
    return {name: value for name, value in ONE_PROCESS_ENV.items() if name not in environ}


def cpu_notes(version: str, flags: Mapping[str, str | None]) -> list[str]:
    """What to know about the choices, if there is something to change."""
    notes = []
    if "--kv-cache-memory-bytes" in flags:
        notes.append(
            f"vLLM {version} is a CPU build. It gets a KV cache of {_KV_CACHE_GIB} GiB. For longer prompts, or for "
            "more requests at once, end the command with another size: -- --kv-cache-memory-bytes 4G."
        )
    if "--dtype" in flags:
        notes.append(
            "This CPU has AMX, with which vllm-cpu 0.31 ends at the first request for a model as small as this one in "
            "bfloat16 (SIGILL). It is served in float32. To try the other, end the command with -- --dtype bfloat16."
        )
    return notes


def has_amx() -> bool:
    """Whether this CPU has tile registers.

    In bfloat16, vllm-cpu 0.31 uses them for attention without requesting them from Linux. For larger models it works,
    because oneDNN requests them, and vLLM multiplies matrices above 1 MiB with that
    (vllm/model_executor/layers/utils.py).
    """
    with contextlib.suppress(OSError):
        return " amx_tile " in Path("/proc/cpuinfo").read_text()
    return False


def _is_tiny(model: str) -> bool:
    """Whether it is a folder with a model whose attention may have no matrix above 1 MiB in 16 bits."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        return bool(json.loads((Path(model) / "config.json").read_bytes())["hidden_size"] <= _TINY_HIDDEN_SIZE)
    return False


def _is_one_process(given: EngineArguments) -> bool:
    # `uni` has one worker. With more ranks, or with a typed executor, the choice is left to vLLM.
    if given.get("--distributed-executor-backend") not in (None, "uni"):
        return False
    return all(given.number(*names, default=1) == 1 for names in _PARALLEL)
