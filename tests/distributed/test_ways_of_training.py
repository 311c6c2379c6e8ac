"""Distributed tier: each way of training with two real processes, against the real server.

DeepSpeed runs unchanged on a CPU. accelerate takes FSDP for GPUs only, so `support/ways.py` changes its state;
the sharding is torch's own, with gloo. What needs a GPU (pinned memory, hence FSDP's CPU offload through the launcher)
is shown by `benchmarks/ways_on_gpus.py`.
"""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launch import CPU_ENV, TESTS, check_launchers, launch_each, seen_in
from support.policies import NOISE_MEAN, OTHER_POLICY_MEAN, RATIO_SPREAD
from support.processes import Finished
from support.servers import adapters_on, damage, proxy_to
from vllm_server import VLLMServer

# The first test waits for all ways of a launch.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
Seen = dict[str, Any]
# What one of them would exceed if it hung, on average.
TIMEOUT_S = 60.0
# As arguments of accelerate launch; `ways.py` takes another stage of ZeRO where the name of the way has one.
TORCH, DEEPSPEED = ("--multi_gpu",), ("--use_deepspeed", "--zero_stage", "3")
# How each is launched, and whether the model is sharded.
WAYS = {
    "ddp": (TORCH, False),
    "zero1": (DEEPSPEED, False),
    "zero2": (DEEPSPEED, False),
    "zero3": (DEEPSPEED, True),
    "fsdp1": (TORCH, True),
    "fsdp1-orig": (TORCH, True),
    "fsdp2": (TORCH, True),
    "ddp-qlora": (TORCH, False),
    "zero3-qlora": (DEEPSPEED, True),
    "fsdp1-orig-qlora": (TORCH, True),
    "fsdp2-qlora": (TORCH, True),
    "fsdp2-whole-qlora": (TORCH, True),
    "zero3-rloo": (DEEPSPEED, True),
    "ddp-pissa": (TORCH, False),
    "zero3-pissa": (DEEPSPEED, True),
    "fsdp1-pissa": (TORCH, True),
    "fsdp2-pissa": (TORCH, True),
    "fsdp1-orig-distillation": (TORCH, True),
    "fsdp2-distillation": (TORCH, True),
}
# Between a 4-bit base in the trainer and the same base unquantised in the server: measured 0.09 to 0.13.
QUANTISED_MEAN = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each way writes."""
    root = tmp_path_factory.mktemp("ways")
    made = {way: root / way for way in WAYS}
    for folder in made.values():
        folder.mkdir()
    return made


@pytest.fixture(scope="module")
def launch_of(
    server: VLLMServer, base_model: Path, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[tuple[str, ...]], Finished]:
    """One launch of each kind, for all ways of training that are started so."""

    def damage_on_demand(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter":
            for order in [folder / "damage-the-next-version" for folder in folders.values()]:
                if order.exists():
                    order.unlink()
                    damage(body["lora_path"])
        return body

    @functools.cache
    def launched(arguments: tuple[str, ...]) -> Finished:
        ways = [way for way, (others, _) in WAYS.items() if others == arguments]
        check_launchers()
        with proxy_to(server.base_url) as proxy:
            proxy.before = damage_on_demand
            env = {} if arguments is DEEPSPEED else CPU_ENV
            script = TESTS / "support" / "ways.py"
            runs = [[way, str(folders[way]), proxy.base_url, str(base_model)] for way in ways]
            folder = tmp_path_factory.mktemp("launch")
            return launch_each(script, runs, folder, arguments, env=env, timeout_s=TIMEOUT_S)

    return launched


@pytest.fixture(scope="module", params=WAYS)
def launched(
    request: pytest.FixtureRequest,
    server: VLLMServer,
    folders: dict[str, Path],
    launch_of: Callable[[tuple[str, ...]], Finished],
) -> Seen:
    """What a way of training came to, in everything that the tests below look at."""
    way = request.param
    arguments, is_sharded = WAYS[way]
    ended = launch_of(arguments)
    left = {name: path for name, path in adapters_on(server.base_url).items() if str(folders[way]) in path}
    return seen_in(folders[way], ended) | {"way": way, "is_sharded": is_sharded, "left": left}


def on_all(launched: Seen, step: str) -> list[Any]:
    """What `step` returned on each process."""
    for seen in launched["seen"]:
        assert "result" in seen[step], seen[step].get("traceback")
    return [seen[step]["result"] for seen in launched["seen"]]


def test_the_launcher_is_the_one_that_was_chosen(launched: Seen) -> None:
    stage = int(launched["way"][4]) if launched["way"].startswith("zero") else None
    assert on_all(launched, "stage") == [stage, stage]


def test_served_policy_is_the_trained_one_at_each_step(launched: Seen) -> None:
    """With QLoRA, but for the quantisation of the base.

    RLOO and distillation compare nothing by themselves; the proofs below do.
    """
    for steps in on_all(launched, "train"):
        assert [step["lora_sync/version"] for step in steps] == [1, 2]
        if launched["way"].endswith(("rloo", "distillation")):
            continue
        for step in steps:
            if launched["way"].endswith("qlora"):
                assert step["sampling/sampling_logp_difference/mean"] < QUANTISED_MEAN
                continue
            assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=RATIO_SPREAD)
            assert step["sampling/sampling_logp_difference/mean"] < NOISE_MEAN


def test_published_adapter_is_bit_for_bit_the_one_of_a_single_process(launched: Seen) -> None:
    first, *others = on_all(launched, "published")

    assert first["files"] == ["adapter_config.json", "adapter_model.safetensors"]
    assert all(first["same"].values()), first["same"]
    for outcome in (first, *others):
        assert outcome["distance"] < NOISE_MEAN
        assert outcome["moved"] > OTHER_POLICY_MEAN
        assert outcome["base_is_intact"]


def test_the_served_adapter_is_proved_by_a_forward_pass_of_all_processes(launched: Seen) -> None:
    """Before training by a trial adapter, and afterwards by the trained one, when the launcher has wrapped the model.

    With QLoRA the quantisation of so small a model is as large as the effect of the trained adapter, which then proves
    nothing; the trial adapter does.
    """
    is_qlora = launched["way"].endswith("qlora")
    for steps in on_all(launched, "train"):
        assert [step["lora_sync/verified"] for step in steps] == [1.0, 1.0]
        assert ["lora_sync/verify_gap" in step for step in steps] == [True, False]
    for logged in on_all(launched, "verified"):
        assert is_qlora or logged["lora_sync/verified"] == 1.0
        assert logged["lora_sync/verify_gap"] < (QUANTISED_MEAN if is_qlora else NOISE_MEAN)


def test_a_sync_moves_the_adapter_and_no_base_parameter(launched: Seen) -> None:
    """Every collective of torch is counted, from any caller; what else moves are exceptions and shapes, pickled.

    Once the server has proved itself, that is; until then a sync includes a forward pass of the model. A matrix moves
    in the dtype it is trained in, which is that of the files here. The difference to an initial adapter has twice the
    rank, and is made on process 0.
    """
    adapter_bytes = on_all(launched, "published")[0]["adapter_bytes"] // (2 if launched["way"].endswith("pissa") else 1)
    for outcome in on_all(launched, "traffic"):
        assert outcome["is_sharded"] == launched["is_sharded"]
        counted = outcome["bytes"]
        reduced = counted.pop("reduce_", [])
        assert reduced == ([adapter_bytes] if launched["is_sharded"] else [])
        assert counted.keys() <= {"allgather_", "broadcast_", "barrier"}, "objects only"
        assert sum(map(sum, counted.values())) < adapter_bytes, counted


def test_the_trained_adapter_is_saved_at_the_end_although_state_dicts_are_sharded(launched: Seen) -> None:
    """Transformers' `save_model` wrote nothing then, and the script ended as if it had."""
    if not launched["way"].startswith("fsdp"):
        pytest.skip("the way of training has no sharded state dicts")
    saved, *others = on_all(launched, "saved")

    assert saved == {"names": True, "same": True, "restored": True}
    assert others == [None]


@pytest.mark.parametrize(
    ("step", "error", "words"),
    [
        ("refused", "AdapterNotVisibleError", "refused to load the adapter"),
        ("failing_gather", "MemoryError", "no room for the shards"),
        ("disproved", "VerificationError", "computes something else with it"),
    ],
    ids=["process 0 fails", "another process fails", "the server computes something else"],
)
def test_a_failure_of_one_process_raises_on_all(step: str, error: str, words: str, launched: Seen) -> None:
    for seen in launched["seen"]:
        assert seen[step].get("error") == error, seen[step]
        assert words in seen[step]["message"]
        assert seen[step]["seconds"] < 60


@pytest.mark.parametrize("step", ["after_refusal", "after_failing_gather"])
def test_training_goes_on_after_a_failure(step: str, launched: Seen) -> None:
    assert all(mean < NOISE_MEAN for mean in on_all(launched, step))


def test_nothing_is_left_on_the_server(launched: Seen) -> None:
    assert launched["left"] == {}
