"""A route through which adapters are pushed to a stock vLLM server, for trainers that share no folder with it.

    vllm serve MODEL --middleware trl_lora_sync.engine_plugins.vllm_push.PushMiddleware ...

    PUT    /v1/lora_sync/adapters/NAME   a safetensors file; answers with the path to load it from
    POST   /v1/lora_sync/adapters/NAME   opens a port for the bytes of such a file, in several connections at once
    DELETE /v1/lora_sync/adapters/NAME   its files, after it was unloaded
    GET    /v1/lora_sync/adapters        what is there, and the largest adapter that is taken

Environment of the server:
    TRL_LORA_SYNC_PUSH_MAX_MB  largest adapter, in MB; 4096 by default
    TRL_LORA_SYNC_PUSH_DIR     where adapters are kept; /dev/shm by default
    TRL_LORA_SYNC_PUSH_STREAMS 0 for none of these ports

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
LENGTH_HEADER = "Lora-Sync-Length"
"""Of a POST: the bytes that will come over the connections."""
STREAMS_HEADER = "Lora-Sync-Streams"
"""Of a POST: over how many connections."""
TOKEN_HEADER = "Lora-Sync-Token"
"""Of a PUT without a body: the upload whose bytes have come over connections."""
CONFIG_KEY = "adapter_config"
"""In the metadata of the safetensors file: what becomes `adapter_config.json`."""
MAX_MB_VARIABLE = "TRL_LORA_SYNC_PUSH_MAX_MB"
DIRECTORY_VARIABLE = "TRL_LORA_SYNC_PUSH_DIR"
STREAMS_VARIABLE = "TRL_LORA_SYNC_PUSH_STREAMS"


def __getattr__(name: str) -> Any:
    if name != "PushMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl_lora_sync.engine_plugins.push_middleware import PushMiddleware

    return PushMiddleware
