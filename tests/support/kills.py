"""A server process that is killed at a chosen point of a sync or of a generation, and started again."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm_server import VLLMServer

from support.faults import COMPLETIONS, LOAD, MODELS, UNLOAD, FaultProxy, fault_proxy
from support.models import peft_model
from support.policies import token_ids
from support.schedules import SmallTrainer, give_time
from trl_lora_sync.errors import LoRASyncError

# (action, route, when): the server dies when the route is first asked in the action, or has answered it.
KILL_POINTS: dict[str, tuple[str, str, str]] = {
    "before it gets the load": ("sync", LOAD, "asked"),
    "after it has loaded": ("sync", LOAD, "answered"),
    "before it lists its adapters": ("sync", MODELS, "asked"),
    "after it has listed its adapters": ("sync", MODELS, "answered"),
    "before it gets an unload": ("sync", UNLOAD, "asked"),
    "before it gets the prompts": ("generate", COMPLETIONS, "asked"),
    "while it samples": ("generate", COMPLETIONS, "asked beside"),
    "after it has sampled": ("generate", COMPLETIONS, "answered"),
}
_LONG_S = 120.0
# The timeout, the clean-up after it, and what a busy machine adds.
_NOTICED_WITHIN_S = 40.0


def kill_at(point: str, server: VLLMServer, base: Path, folder: Path, timeout_s: float = 15.0) -> dict[str, Any]:
    """Kill `server` at a point of `KILL_POINTS` in an otherwise healthy run, restart it, and go on.

    Args:
        timeout_s: of a sync and of a generation, while the server is dead.

    Returns:
        `"raised"`: the error that ended the action, or None; `"noticed_s"`: how long that took; `"violations"`:
        what was wrong, which must be nothing.
    """
    action, route, when = KILL_POINTS[point]
    model = peft_model(base).eval()
    (folder / "sync").mkdir(parents=True)
    (folder / "seen").symlink_to(folder / "sync", target_is_directory=True)
    violations: list[str] = []
    with fault_proxy(server.base_url) as proxy:
        trainer = SmallTrainer(model, AutoTokenizer.from_pretrained(base), [proxy.base_url], folder, first_seed=50)
        trainer.start(_LONG_S)
        for _ in range(3):  # the next one unloads
            trainer.sync()
        give_time(trainer.generation, timeout_s)
        believed = trainer.believed
        _arm(proxy, route, when, server.kill)
        started = time.monotonic()
        raised = _attempt(trainer, action, violations)
        noticed_s = time.monotonic() - started
        proxy.on_request = proxy.on_answer = proxy.while_asking = _nothing
        if server.is_running():
            violations.append("the server was not killed, so this proves nothing")
            server.kill()
        if raised is not None and trainer.believed != believed:
            violations.append("a version became active although its sync raised")
        if noticed_s > _NOTICED_WITHIN_S:
            violations.append(f"the dead server was noticed after {noticed_s:.0f} s")
        server.start()
        give_time(trainer.generation, _LONG_S)
        for step in ("generate", "sync", "generate"):  # the first finds out that the adapters are lost
            error = _attempt(trainer, step, violations)
            if error is not None:
                violations.append(f"after the restart, {step} raised {error}")
        trainer.close()
    return {"raised": raised, "noticed_s": round(noticed_s, 1), "violations": violations}


def _attempt(trainer: SmallTrainer, action: str, violations: list[str]) -> str | None:
    """Sync or generate; returns the name of the error, if any."""
    try:
        if action == "sync":
            trainer.sync()
            return None
        rows = trainer.generate([token_ids(1), token_ids(2)])
    except LoRASyncError as error:
        return type(error).__name__
    if not trainer.checker.sampled_by(rows, trainer.believed):
        violations.append("a completion of another version was accepted")
    return None


def _arm(proxy: FaultProxy, route: str, when: str, kill: Callable[[], None]) -> None:
    def on_route(path: str, body: dict[str, Any]) -> None:
        if path == route:
            proxy.on_request = proxy.on_answer = proxy.while_asking = _nothing
            kill()

    if when == "answered":
        proxy.on_answer = on_route
    elif when == "asked":
        proxy.on_request = on_route
    else:
        proxy.while_asking = on_route


def _nothing(path: str, body: dict[str, Any]) -> None:
    pass
