"""One decision for all training processes: process 0 acts, everybody gets its result or its exception.

Knows accelerate's process group and nothing of adapters or servers.
"""

import os
import pickle
from collections.abc import Callable
from typing import Any, TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

from trl_lora_sync.errors import RemoteProcessError, UnsupportedSettingError

T = TypeVar("T")


def run_on_main(accelerator: Accelerator, act: Callable[[], T]) -> T:
    """**Collective.** Run `act` on process 0 and return its result, or raise its exception, on every process.

    The other processes wait inside a broadcast, so `act` must end well before the process group's own timeout.

    Args:
        act: called on process 0 only. Its result must pickle.
    """
    outcome: list[tuple[Any, BaseException | None]] = [(None, None)]
    if accelerator.is_main_process:
        outcome = [_attempt(act)]
    if accelerator.num_processes > 1:
        shared = [_sendable(outcome[0])] if accelerator.is_main_process else [None]
        broadcast_object_list(shared, from_process=0)
        if not accelerator.is_main_process:
            outcome = [shared[0]]  # type: ignore[list-item]
    result, error = outcome[0]
    if error is not None:
        raise error
    return result  # type: ignore[no-any-return]


def check_launch_arguments(args: Any) -> None:
    """Refuse sharded training as far as the trainer's arguments and environment tell, before a model is loaded.

    Raises:
        UnsupportedSettingError: under DeepSpeed ZeRO-3 or FSDP.
    """
    deepspeed = getattr(args, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise _sharded("DeepSpeed ZeRO-3", "Use ZeRO-2 or DDP")
    if getattr(args, "fsdp", None) or os.environ.get("ACCELERATE_USE_FSDP", "false").lower() in ("1", "true", "yes"):
        raise _sharded("FSDP", "Use DDP")


def check_launcher(accelerator: Accelerator) -> None:
    """Refuse the ways of training whose parameters are sharded, by what accelerate really set up.

    Raises:
        UnsupportedSettingError: under DeepSpeed ZeRO-3 or FSDP.
    """
    state = accelerator.state
    deepspeed = getattr(state, "deepspeed_plugin", None)
    if deepspeed is not None and deepspeed.zero_stage == 3:
        raise _sharded("DeepSpeed ZeRO-3", "Use ZeRO-2 or DDP")
    if getattr(state, "fsdp_plugin", None) is not None:
        raise _sharded("FSDP", "Use DDP")


def _sharded(launcher: str, fix: str) -> UnsupportedSettingError:
    return UnsupportedSettingError(
        f'vllm_sync_strategy="lora_adapter" does not support {launcher} yet: the adapter is sharded over the processes '
        f'and is not gathered in this release. {fix}, or set vllm_sync_strategy="weights".'
    )


def _attempt(act: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    try:
        return act(), None
    except BaseException as error:  # an interrupt must reach the processes that wait as well
        return None, error


def _words_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # the other processes must hear of the failure all the same
        return "an exception that cannot be shown"


def _sendable(outcome: tuple[Any, BaseException | None]) -> tuple[Any, BaseException | None]:
    error = outcome[1]
    if error is None:
        return outcome
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return None, RemoteProcessError(f"Process 0 failed with {type(error).__name__}: {_words_of(error)}")
    return None, error
