"""A server process that is killed at a chosen point of a sync or of a generation, and started again.

Alone, or with another one beside it that lives on.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from vllm_server import VLLMServer

from support.faults import COMPLETIONS, LOAD, MODELS, UNLOAD, FaultProxy, fault_proxies
from support.models import peft_model
from support.policies import token_ids
from support.schedules import SmallTrainer, give_time, sampled_directly
from support.servers import adapters_on
from trl_lora_sync.errors import LoRASyncError

# (action, route, when): the server is killed at the first request to the route in the action, or at its answer.
KILL_POINTS: dict[str, tuple[str, str, str]] = {
    "before it gets the load": ("sync", LOAD, "requested"),
    "after it has loaded": ("sync", LOAD, "answered"),
    "before it lists its adapters": ("sync", MODELS, "requested"),
    "after it has listed its adapters": ("sync", MODELS, "answered"),
    "before it gets an unload": ("sync", UNLOAD, "requested"),
    "before it gets the prompts": ("generate", COMPLETIONS, "requested"),
    "while it samples": ("generate", COMPLETIONS, "beside the request"),
    "after it has sampled": ("generate", COMPLETIONS, "answered"),
}
_LONG_S = 120.0
# The timeout, the clean-up after it, and what a busy machine adds.
_NOTICED_WITHIN_S = 40.0


def kill_at(
    point: str,
    server: VLLMServer,
    base: Path,
    folder: Path,
    timeout_s: float = 15.0,
    beside: VLLMServer | None = None,
    on_server_loss: str = "error",
) -> dict[str, Any]:
    """Kill `server` at a point of `KILL_POINTS` in an otherwise healthy run, restart it, and go on.

    Args:
        timeout_s: of a sync and of a generation, while the server is dead.
        beside: a second server of the same run.

    Returns:
        `"raised"`: the error that ended the action, or None; `"took_s"`: how long that took; `"violations"`: what was
        wrong, which must be nothing.
    """
    action, route, when = KILL_POINTS[point]
    model = peft_model(base).eval()
    (folder / "sync").mkdir(parents=True)
    (folder / "seen").symlink_to(folder / "sync", target_is_directory=True)
    violations: list[str] = []
    servers = [server, *([beside] if beside else [])]
    with fault_proxies([one.base_url for one in servers]) as proxies:
        proxy, urls = proxies[0], [one.base_url for one in proxies]
        trainer = SmallTrainer(
            model, AutoTokenizer.from_pretrained(base), urls, folder, first_seed=50, on_server_loss=on_server_loss
        )
        trainer.start(_LONG_S)
        for _ in range(3):  # the next one unloads
            trainer.sync()
        give_time(trainer.generation, timeout_s)
        believed = trainer.believed
        _arm(proxy, route, when, server.kill)
        started = time.monotonic()
        raised = _attempt(trainer, action, violations)
        took_s = time.monotonic() - started
        proxy.on_request = proxy.on_answer = proxy.while_asking = _nothing
        if server.is_running():
            violations.append("the server was not killed, so this proves nothing")
            server.kill()
        if raised is not None and trainer.believed != believed:
            violations.append("a version became active although its sync raised")
        if took_s > _NOTICED_WITHIN_S:
            violations.append(f"the dead server was noticed after {took_s:.0f} s")
        if beside is not None:
            violations += _wrong_on(beside, trainer, "beside the dead one")
        server.start()
        give_time(trainer.generation, _LONG_S)
        for step in ("generate", "sync", "generate"):  # the first finds out that the adapters are lost
            error = _attempt(trainer, step, violations)
            if error is not None:
                violations.append(f"after the restart, {step} raised {error}")
        for one in servers:
            violations += _wrong_on(one, trainer, "after the restart")
        trainer.close()
    return {"raised": raised, "took_s": round(took_s, 1), "violations": violations}


def _wrong_on(server: VLLMServer, trainer: SmallTrainer, when: str) -> list[str]:
    """What is wrong with what a server has and samples, by requests without the package."""
    loaded = adapters_on(server.base_url)
    wrong = [f"{when}: a server has {name}, which no sync accepted" for name in loaded.keys() - set(trainer.accepted)]
    row = sampled_directly(server.base_url, trainer.accepted[-1], token_ids(3))
    if row is None:
        wrong.append(f"{when}: a server does not have the active version")
    elif not trainer.checker.sampled_by([row], trainer.believed):
        wrong.append(f"{when}: a server samples another version in the name of the active one")
    return wrong


def _attempt(trainer: SmallTrainer, action: str, violations: list[str]) -> str | None:
    """Sync or generate; returns the name of the error, if any."""
    try:
        if action == "sync":
            trainer.sync()
            return None
        rows = trainer.generate([token_ids(seed) for seed in range(4)])
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
    elif when == "requested":
        proxy.on_request = on_route
    else:
        proxy.while_asking = on_route


def _nothing(path: str, body: dict[str, Any]) -> None:
    pass
