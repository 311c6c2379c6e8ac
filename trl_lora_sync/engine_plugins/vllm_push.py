"""A route through which adapters are pushed to a stock vLLM server, for trainers that share no folder with it.

    vllm serve MODEL --middleware trl_lora_sync.engine_plugins.vllm_push.PushMiddleware ...

    PUT    /v1/lora_sync/adapters/NAME   a safetensors file; answers with the path to load it from
    DELETE /v1/lora_sync/adapters/NAME   its files, after it was unloaded
    GET    /v1/lora_sync/adapters        what is there, and the largest adapter that is taken

Environment of the server:
    TRL_LORA_SYNC_PUSH_MAX_MB  largest adapter, in MB; 4096 by default
    TRL_LORA_SYNC_PUSH_DIR     where adapters are kept; /dev/shm by default

The names below are what trainer and server must agree on. The trainer's environment has no Starlette, so the middleware
is imported on first use.
"""

from typing import Any

MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_push.PushMiddleware"
ROUTE = "/v1/lora_sync/adapters"
# Trainer and server are installed apart; a trainer pushes only to a server with the same number.
PROTOCOL = 2
CHECKSUM_HEADER = "Lora-Sync-Checksum"
"""Of a push: the checksum of the whole body, see `engine_plugins.checksum`."""
CONFIG_KEY = "adapter_config"
"""In the metadata of the safetensors file: what becomes `adapter_config.json`."""
MAX_MB_VARIABLE = "TRL_LORA_SYNC_PUSH_MAX_MB"
DIRECTORY_VARIABLE = "TRL_LORA_SYNC_PUSH_DIR"


def __getattr__(name: str) -> Any:
    if name != "PushMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl_lora_sync.engine_plugins.push_middleware import PushMiddleware

    return PushMiddleware
