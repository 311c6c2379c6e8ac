"""Live tier: the benchmark of one sync against the real vLLM server."""

import json
import sys
from pathlib import Path

from support.processes import Finished, run_script
from vllm_server import VLLMServer

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "sync_cost.py"


def run_cost(folder: Path, *arguments: str | Path) -> Finished:
    return run_script([sys.executable, SCRIPT, *arguments], folder / "log", 400.0)


def test_sync_cost_measures_a_running_server(clean_server: VLLMServer, base_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "results" / "cost.json"
    ended = run_cost(tmp_path, "--quick", "--url", f"{clean_server.base_url}/v1", "--model", base_model, "--out", out)
    assert ended.code == 0, ended.output
    result = json.loads(out.read_text())
    assert result["command"].startswith("python benchmarks/sync_cost.py --quick")
    assert (result["started_by_this_script_on_the_cpu"], result["model_is_made"]) == (False, False)
    [rank] = result["ranks"]
    assert rank["sync"].keys() == {"save_pretrained", "export bfloat16", "export float32"}
    assert "adapter / base" in ended.output


def test_sync_cost_refuses_a_model_that_is_not_a_folder(tmp_path: Path) -> None:
    ended = run_cost(tmp_path, "--url", "http://127.0.0.1:1", "--model", tmp_path / "missing")
    assert ended.code == 2
    assert "missing is not a folder. Give the folder" in ended.output
