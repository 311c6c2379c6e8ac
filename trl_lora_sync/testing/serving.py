"""Servers of this folder with the model that a test trains."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trl_lora_sync.testing.policy import ModelPolicy
from trl_lora_sync.testing.sglang import FakeSGLang
from trl_lora_sync.testing.sglang_scheduler import ServerArgs


def server_args(model_path: str | Path | None, **changes: Any) -> ServerArgs:
    """How a server of a model is started.

    Args:
        model_path: of a checkpoint, see `ModelPolicy`; None for a formula as base model, which no trainer has.
        changes: fields of `ServerArgs`.
    """
    if model_path is None:
        return ServerArgs(**changes)
    policy = ModelPolicy(model_path)
    ends = policy.config.eos_token_id
    # Read from the checkpoint, as the checks compare them with what the trainer has read from it.
    found: dict[str, Any] = {
        "model_path": str(model_path),
        "policy": policy,
        "shapes": policy.shapes,
        "context_length": policy.config.max_position_embeddings,
        # -1 equals no token, for a model whose samples end by their length alone.
        "eos_token_id": ends[0] if isinstance(ends, list) else -1 if ends is None else ends,
    }
    return ServerArgs(**found | changes)


@contextmanager
def serving_sglang(model_path: str | Path | None = None, **args: Any) -> Iterator[FakeSGLang]:
    """Run a server with SGLang's routes and rules while the block lasts; its `base_url` goes to the trainer.

    Args:
        model_path: what to serve: a small checkpoint with dense decoder layers, such as Llama, Qwen2 or Qwen3. The
            trainer must train the same one. `None` serves a formula, for code that talks to a server without a trainer.
        args: fields of `ServerArgs`, such as `version="0.5.17"` or `max_lora_rank=64`.
    """
    with FakeSGLang(server_args(model_path, **args)) as server:
        yield server
