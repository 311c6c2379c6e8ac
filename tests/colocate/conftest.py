"""Fixtures of the colocate tier, which runs in an environment with vLLM: `.venv-colocate`, made by `make`.

Everything is float32, in the trainer and in the engine, so that served and trained log-probabilities agree to 1e-4.
torch is imported where it is used: the process that hands out the tests reads this file before it starts the others.
"""

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    has_vllm = importlib.util.find_spec("vllm") is not None
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            if not has_vllm:
                item.add_marker(pytest.mark.skip(reason="vLLM is not in this environment; run: make test-colocate"))


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


@pytest.fixture(scope="session", autouse=True)
def _own_port() -> Iterator[None]:
    """For the group of one process that vLLM makes here: the usual 29500 may be taken by another run."""
    from vllm_server import hold_free_port

    with hold_free_port() as held, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_PORT", str(held.getsockname()[1]))
        yield


@pytest.fixture(scope="session", autouse=True)
def _small_kv_caches() -> Iterator[None]:
    """64 MiB for each engine, as some stay until Python collects cycles: in whole GiB, 19 GB were seen."""
    platform = pytest.importorskip("vllm.platforms.cpu", reason="run: make test-colocate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(platform, "GiB_bytes", 64 << 20)  # which VLLM_CPU_KVCACHE_SPACE counts in (0.31)
        patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_frozen_heap() -> Iterator[None]:
    """An engine freezes the heap (0.31), which `engine.build` undoes; then each collection takes 0.25 s longer."""
    core = pytest.importorskip("vllm.v1.engine.core", reason="run: make test-colocate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "freeze_gc_heap", lambda: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _readable_weights() -> None:
    """Let the engine keep its weights as they are; a CPU build packs them and leaves an empty parameter (0.31)."""
    import torch

    utils = pytest.importorskip("vllm.model_executor.layers.utils", reason="run: make test-colocate")

    def keep(layer: "torch.nn.Module", remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    utils.dispatch_cpu_unquantized_gemm = keep
