"""Fused serving: routes through which an adapter is added to the weights that a stock vLLM server serves.

    vllm serve MODEL --worker-extension-cls trl_lora_sync.engine_plugins.vllm_fused_worker.FusedWorker \
        --middleware trl_lora_sync.engine_plugins.vllm_fused.FusedMiddleware ...

    GET    /v1/lora_sync/fused        which adapter is in the weights, and which are registered
    PUT    /v1/lora_sync/fused/NAME   {"path": FOLDER}: register an adapter and put it into the weights
    DELETE /v1/lora_sync/fused/NAME   unregister it; if it is in the weights, they become the base's again

The header X-LoRA-Sync-Adapter of a request for tokens names the adapter it is for, or `(base)`; if another is in the
weights, they are changed first. The same header of each answer names what it was sampled from. A request without the
header is answered from whatever is in the weights. No request is under way while the weights change: requests over
HTTP are counted here, the engine's own are waited for with its pause.

A trainer on the server's host need not send these requests for its next version, as with `vllm_quick_load`, whose route
`/v1/lora_sync/slots` is here too. The engine is paused when the trainer begins to write the version, and the version
goes into the weights once it is written; `reservations` has the messages.

The development mode of vLLM is not needed. Each request here is checked against the server's API keys.

The names below are what trainer and server must agree on. The trainer's environment has no Starlette, so the middleware
is imported on first use.
"""

from typing import Any

# Trainer and server are installed apart, so these may change together with PROTOCOL only.
MIDDLEWARE = "trl_lora_sync.engine_plugins.vllm_fused.FusedMiddleware"
WORKER = "trl_lora_sync.engine_plugins.vllm_fused_worker.FusedWorker"
ROUTE = "/v1/lora_sync/fused"
HEADER = "X-LoRA-Sync-Adapter"
# Never the name of an adapter, in which `check_name` takes no brackets.
BASE = "(base)"
PROTOCOL = 1


def __getattr__(name: str) -> Any:
    if name != "FusedMiddleware":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from trl_lora_sync.engine_plugins.fused_middleware import FusedMiddleware

    return FusedMiddleware
