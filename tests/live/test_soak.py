"""Live tier: a short cut of `benchmarks/soak.py`, whose result over 2,000 syncs is in `benchmarks/results`."""

import json
import os
import sys
from pathlib import Path

from support.processes import run_script
from vllm_server import VLLMServer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"
SYNCS, WARM_UP = 60, 20


def test_sixty_syncs_leave_threads_open_files_and_adapters_as_they_were(
    clean_server: VLLMServer, base_model: Path, tmp_path: Path
) -> None:
    server = ["--model", base_model, "--url", clean_server.base_url, "--server-pid", str(clean_server.pid)]
    rounds = ["--syncs", str(SYNCS), "--rank", "8", "--out", tmp_path / "soak.json"]
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)}

    ended = run_script([sys.executable, SCRIPT, *server, *rounds], tmp_path / "log", 250.0, environment)

    assert ended.code == 0, ended.output
    result = json.loads((tmp_path / "soak.json").read_text())
    assert result["syncs"] == SYNCS
    assert result["adapters_left_on_server"] == []
    after = result["rounds"][WARM_UP:]
    # One more is a connection or a thread between two requests; a leak of one per sync would be forty.
    for name in ("trainer_threads", "trainer_open_files", "server_threads", "server_open_files"):
        values = [row[name] for row in after]
        assert max(values) - min(values) <= 8, (name, values)
    # The two that are registered, and one whose unload goes on beside the training; its files stay one sync longer.
    assert max(row["adapters_on_server"] for row in after) <= 3
    assert max(row["files"] for row in after) <= 1 + 3 * 4
