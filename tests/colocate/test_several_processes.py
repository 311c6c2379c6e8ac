"""Colocate mode with two training processes: each with an engine, or one engine for both.

Run by the Python of `.venv-colocate`, which has vLLM beside the trainer. One launch per way.
"""

from pathlib import Path
from typing import Any

import pytest
from support.launch import CPU_ENV, TESTS, check_launchers, launch

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
Seen = dict[str, Any]
# What a hang would exceed; a launch takes 40 to 60 s.
TIMEOUT_S = 120.0
ACCELERATE = {
    "ddp": ["--multi_gpu"],
    "fsdp2": ["--multi_gpu"],
    "zero2": ["--use_deepspeed", "--zero_stage", "2"],
    "zero3": ["--use_deepspeed", "--zero_stage", "3"],
}


@pytest.fixture(scope="module", params=["ddp", "ddp+tp2", "fsdp2"])
def launched(request: pytest.FixtureRequest, base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    return launch_way(request.param, base_model, tmp_path_factory.mktemp(request.param))


def launch_way(way: str, model: Path, folder: Path) -> Seen:
    launcher = way.partition("+")[0]
    if launcher.startswith("zero"):
        check_launchers()
    env = {} if launcher.startswith("zero") else CPU_ENV
    script = TESTS / "support" / "colocate_ways.py"
    values = [way, str(folder), str(model)]
    return launch(script, values, folder, ACCELERATE[launcher], env=env, timeout_s=TIMEOUT_S) | {"way": way}
