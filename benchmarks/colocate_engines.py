"""Options of vLLM in the trainer's process that TRL has no field for."""

from typing import Any


def change_engines(**changed: Any) -> None:
    """Start TRL's own engine and this package's with these arguments of `vllm.LLM` from now on, in this process."""
    import trl.generation.vllm_generation as generation

    from trl_lora_sync.colocate import engine

    llm, build = generation.LLM, engine.build
    generation.LLM = lambda **given: llm(**{**given, **changed})
    engine.build = lambda options, gate, **given: build({**options, **changed}, gate, **given)
