"""The engines that there are, by name, and the command that starts a server of the same kind again."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from trl_lora_sync.engines.sglang.spec import SGLANG
from trl_lora_sync.engines.vllm.spec import VLLM

if TYPE_CHECKING:
    from trl_lora_sync.engines.base import Engine
    from trl_lora_sync.engines.server import ServerEngine

ENGINES = {spec.name: spec for spec in (VLLM, SGLANG)}


def restart_command(
    engine: "Engine | ServerEngine",
    *options: str,
    is_local: bool,
    engine_options: Sequence[str] = (),
    model: str | None = None,
) -> str:
    """The command that starts this server with other options, see `EngineSpec.serve_command`.

    Repeats the rank and the modules that the server reports, as without them it may not take the adapter any more.

    Args:
        is_local: whether it runs on this host.
        model: what it is to serve, if not the same as now.
    """
    served, url = engine.capabilities, engine.base_url
    if served.max_lora_rank is not None and "--lora-rank" not in options:
        options += ("--lora-rank", str(served.max_lora_rank))
    # Another model may have no modules of these names.
    if served.target_modules and model is None and "--lora-target-modules" not in engine_options:
        engine_options = [*engine_options, "--lora-target-modules", *sorted(served.target_modules)]
    return ENGINES[served.engine].serve_command(
        model or served.base_root,
        ("--fused", *options) if served.is_fused else options,
        engine_options=engine_options,
        base_url=url,
        is_local=is_local,
    )
