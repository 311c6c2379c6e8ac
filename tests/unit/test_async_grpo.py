"""Unit tier: the settings of an asynchronous trainer, and its rollouts on several servers other than vLLM."""

import dataclasses
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate import PartialState
from contract.served import SMALL
from datasets import Dataset
from make_model import make_tokenizer
from packaging.version import Version
from peft import LoraConfig
from support.async_runs import AsyncGRPOConfig, AsyncGRPOTrainer
from support.interrupts import Interrupts
from support.models import peft_model
from support.waiting import happens
from tree_attention import flash_attn_varlen_func, plain_kernel
from trl.chat_template_utils import qwen3_template
from trl.experimental import async_grpo as trls

from trl_lora_sync import GRPOConfig, GRPOTrainer, LoRASyncConfig, LoRASyncTrainer, _trl
from trl_lora_sync.async_grpo import AsyncLoRASyncTrainer
from trl_lora_sync.checks.verify import PROBE_PROMPT
from trl_lora_sync.errors import LoRASyncError, UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.generation.rollouts import RolloutWorker
from trl_lora_sync.generation.scoring import adapter_logprobs
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang
from unit.fleets import FleetRun, settings_for

ON_CPU: dict[str, Any] = {"use_cpu": True, "bf16": False, "report_to": "none"}
SYNC: dict[str, Any] = {
    "vllm_sync_strategy": "lora_adapter",
    "vllm_server_base_url": "http://localhost:8000,http://gpu7:8000",
}

# The loop of 1.14 has other arguments, and no packing. `live/test_trl_versions.py` trains with it.
of_115 = pytest.mark.skipif(Version(trl.__version__) < Version("1.15"), reason="TRL 1.14 is installed")


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


class GRPOWithTheAsynchronousMixin(AsyncLoRASyncTrainer, GRPOTrainer):  # type: ignore[misc]
    """Two mixins on a trainer that needs the other one."""


@dataclass
class PlainMixinConfig(LoRASyncConfig, trls.AsyncGRPOConfig):  # type: ignore[misc]
    """The mixin for the other trainers."""


class PlainMixinTrainer(LoRASyncTrainer, trls.AsyncGRPOTrainer):  # type: ignore[misc]
    """The mixin for the other trainers."""


# Settings


def test_configuration_has_trls_fields_and_those_of_every_other_configuration() -> None:
    names = [field.name for field in dataclasses.fields(AsyncGRPOConfig)]
    assert names == [field.name for field in dataclasses.fields(trls.AsyncGRPOConfig)] + [
        field.name for field in dataclasses.fields(LoRASyncConfig)
    ]


def test_configuration_pickles_and_changes_nothing_by_default(folder: str) -> None:
    assert AsyncGRPOConfig(output_dir=folder, **ON_CPU).vllm_sync_strategy == "weights"
    made = AsyncGRPOConfig(output_dir=folder, **ON_CPU, **SYNC, lora_sync_keep=3)
    assert pickle.loads(pickle.dumps(made)).lora_sync_keep == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lora_sync_overlap": 1}, "it samples beside the training by itself"),
        ({"lora_sync_serving": "fused"}, "a fused server has one version at a time"),
        ({"lora_sync_pause": "drain"}, "a load would wait for requests or end them"),
        ({"vllm_server_sleep": "kv_cache"}, "they need their KV cache"),
        ({"lora_sync_keep": 1}, "Set it to 2 or more"),
        ({"lora_sync_timeout": 0}, "lora_sync_timeout must be a positive, finite number of seconds, got 0"),
        ({"vllm_server_base_url": "localhost:8000"}, "is not a URL"),
        ({"max_staleness": None}, "max_staleness must be a whole number, got None"),
        ({"max_staleness": -1}, "each sample would be too old to train on. Set it to 0 or more"),
    ],
)
def test_setting_that_cannot_be_used_is_named_with_the_reason(changes: dict[str, Any], words: str, folder: str) -> None:
    with pytest.raises(UnsupportedSettingError) as caught:
        AsyncGRPOConfig(output_dir=folder, **ON_CPU, **{**SYNC, **changes})
    assert str(caught.value).startswith(next(iter(changes)))
    assert words in str(caught.value)


@pytest.mark.outside
def test_server_needs_room_for_every_version_of_the_window_and_the_one_that_is_loaded(folder: str) -> None:
    from trl_lora_sync.config import sync_settings

    settings: Any = sync_settings(AsyncGRPOConfig(output_dir=folder, **ON_CPU, **SYNC, max_staleness=3))
    assert settings.versions_at_once == 5
    assert len(settings.servers) == 2


# What comes before a model is loaded


def build(trainer: type[Any], config: Any, **given: Any) -> Any:
    given = {"reward_funcs": len, "train_dataset": Dataset.from_list([{"prompt": "a"}]), **given}
    return trainer("no/such/model", args=config, **{"peft_config": LoraConfig(), **given})


@pytest.mark.outside
def test_adapter_is_checked_before_a_model_is_loaded(folder: str) -> None:
    config = AsyncGRPOConfig(output_dir=folder, **ON_CPU, **SYNC)
    with pytest.raises(UnsupportedAdapterError, match="use_dora=True"):
        build(AsyncGRPOTrainer, config, peft_config=LoraConfig(use_dora=True))
    with pytest.raises(Exception, match="no/such/model") as caught:
        build(AsyncGRPOTrainer, config)
    assert not isinstance(caught.value, LoRASyncError)


@pytest.mark.parametrize("name", ["rollout_worker", "weight_transfer"])
def test_argument_whose_place_adapter_sync_takes_is_refused(name: str, folder: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{name} cannot be used with .* Leave it out"):
        build(AsyncGRPOTrainer, AsyncGRPOConfig(output_dir=folder, **ON_CPU, **SYNC), **{name: object()})


def test_mixin_for_the_other_trainers_says_which_one_to_take(folder: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"AsyncGRPOConfig cannot .* from trl_lora_sync\.async_grpo"):
        PlainMixinConfig(output_dir=folder, **ON_CPU, **SYNC)
    with pytest.raises(UnsupportedSettingError, match=r"AsyncGRPOTrainer cannot .* from trl_lora_sync\.async_grpo"):
        build(PlainMixinTrainer, AsyncGRPOConfig(output_dir=folder, **ON_CPU, **SYNC))


def test_mixin_for_the_asynchronous_trainer_fits_no_other(folder: str) -> None:
    fields = {**SYNC, "use_vllm": True, "vllm_mode": "server"}
    with pytest.raises(UnsupportedSettingError, match="does not derive from TRL's AsyncGRPOTrainer"):
        build(GRPOWithTheAsynchronousMixin, GRPOConfig(output_dir=folder, **ON_CPU, **fields))
    with pytest.raises(UnsupportedSettingError, match=r"mix in AsyncLoRASyncConfig"):
        build(AsyncGRPOTrainer, GRPOConfig(output_dir=folder, **ON_CPU, **fields))


def test_rollout_worker_is_replaced_while_a_trainer_is_built_only() -> None:
    from trl.experimental.async_grpo import async_grpo_trainer

    original = async_grpo_trainer.AsyncRolloutWorker
    with _trl.rollout_worker_class(AsyncGRPOTrainer, len):
        assert async_grpo_trainer.AsyncRolloutWorker is len
    assert async_grpo_trainer.AsyncRolloutWorker is original
    assert issubclass(RolloutWorker, original)  # TRL's trainer checks this before it resumes


@of_115
def test_model_of_the_trainer_scores_a_plain_prompt_in_the_block_and_is_as_before_afterwards(base_model: Path) -> None:
    from trl.experimental.async_grpo.packing import TREE_ATTENTION, register_tree_attention

    register_tree_attention()
    expected = peft_model(base_model)
    model = peft_model(base_model)
    inner = model.get_base_model()
    inner.config._attn_implementation = TREE_ATTENTION

    def needs_labels(*_: Any, **__: Any) -> None:
        raise AssertionError("requires labels")

    inner.forward = needs_labels
    with _trl.plain_forward(model):
        scores = adapter_logprobs(model, PROBE_PROMPT)

    assert scores == adapter_logprobs(expected, PROBE_PROMPT)
    assert inner.config._attn_implementation == TREE_ATTENTION
    assert inner.forward is needs_labels


class Inert:
    """In the place of TRL's rollout worker and of its transfer of weights."""

    rollout_buffer: Any = queue.Queue()
    metrics_queue: Any = queue.Queue()


def test_with_weights_the_trainer_is_trls(folder: str, base_model: Path) -> None:
    worker, transfer = Inert(), Inert()
    with plain_kernel():
        trainer = AsyncGRPOTrainer(
            str(base_model),
            args=AsyncGRPOConfig(output_dir=folder, **ON_CPU),
            reward_funcs=len,
            train_dataset=Dataset.from_list([{"prompt": "a"}]),
            rollout_worker=worker,
            weight_transfer=transfer,
        )
    assert trainer.rollout_worker is worker
    assert trainer.weight_transfer is transfer
    assert not hasattr(trainer, "vllm_generation")


# Rollouts


@pytest.fixture
def training(tmp_path: Path) -> Iterator[FleetRun]:
    """On two SGLang servers, with a staleness window of two versions."""
    PartialState()
    with ExitStack() as stack:
        fakes = [stack.enter_context(FakeSGLang(shapes=SMALL)) for _ in range(2)]
        begun = FleetRun(AdapterSync(settings_for(fakes, tmp_path / "sync", staleness=2)), fakes)
        stack.callback(begun.sync.close)
        begun.start()
        begun.publish()
        yield begun


def worker_for(training: FleetRun, **changes: Any) -> RolloutWorker:
    tokenizer = make_tokenizer()
    tokenizer.response_template = qwen3_template
    rows = [{"prompt": [{"role": "user", "content": text}]} for text in ("one", "two", "three")]
    fields: dict[str, Any] = {
        "model_name": "served", "dataset": Dataset.from_list(rows), "processing_class": tokenizer,
        "reward_funcs": [lambda completions, **_: [float(len(one[-1]["content"])) for one in completions]],
        "eos_token_ids": [tokenizer.eos_token_id], "num_generations": 4, "max_inflight_tasks": 6, "max_tokens": 6,
        "queue_maxsize": 64, "request_timeout": 20,
    }  # fmt: skip
    worker = RolloutWorker(sync=lambda: training.sync, settings=training.sync.settings, **{**fields, **changes})
    worker.update_model_version(1)
    return worker


def taken(worker: RolloutWorker, count: int) -> list[Any]:
    return [worker.rollout_buffer.get(timeout=30) for _ in range(count)]


@of_115
@pytest.mark.outside
def test_each_group_comes_from_one_version_and_says_which_on_servers_that_name_none(training: FleetRun) -> None:
    worker = worker_for(training)
    worker.start()
    samples = taken(worker, 12)
    for _ in range(3):
        worker.update_model_version(training.publish().version)
        samples += taken(worker, 12)
    while samples[-1].model_version == 1:  # what was waiting for the trainer before the first of these syncs
        samples += taken(worker, 4)
    worker.stop()

    by_group: dict[int, set[int]] = {}
    for sample in samples:
        by_group.setdefault(sample.group_id, set()).add(sample.model_version)
        length = int(sample.completion_mask.sum())
        ids = sample.input_ids.tolist()
        expected = training.fakes[0].expected_logprobs(
            training.read[sample.model_version], ids[:-length], ids[-length:]
        )
        assert sample.old_log_probs[-length:].tolist() == pytest.approx(expected, abs=1e-4)
    assert {len(versions) for versions in by_group.values()} == {1}
    assert len({sample.model_version for sample in samples}) > 1
    assert training.sync.ledger.leased == []


class SlowEnvironment:
    """Keeps its first sample until `may_go_on` is set."""

    has_begun = threading.Event()
    may_go_on = threading.Event()

    def reset(self, **kwargs: Any) -> None:
        self.has_begun.set()
        assert self.may_go_on.wait(30)


@of_115
@pytest.mark.outside
def test_a_version_that_is_too_old_to_train_on_goes_though_a_sample_of_it_is_in_a_slow_environment(
    training: FleetRun,
) -> None:
    worker = worker_for(training, environment_factory=SlowEnvironment)
    try:
        worker.start()
        assert SlowEnvironment.has_begun.wait(30)
        assert [stored.version for stored in training.sync.ledger.leased] == [1]
        for version in (2, 3, 4):  # with a staleness window of two, samples of 1 are dropped from 4 on
            assert training.publish().version == version
            worker.update_model_version(version)
            training.wait_for_unloads()
        assert happens(lambda: training.sync.ledger.leased == [])
        training.publish()
        training.wait_for_unloads()
        assert training.adapters() == [["v4", "v5"]] * 2
        SlowEnvironment.may_go_on.set()
        assert {sample.model_version for sample in taken(worker, 4)} == {5}
    finally:
        SlowEnvironment.may_go_on.set()
        worker.stop()
    assert training.sync.ledger.leased == []


@of_115
@pytest.mark.outside
def test_stopping_gives_the_leases_back_and_ends_the_requests(training: FleetRun) -> None:
    worker = worker_for(training, queue_maxsize=2)  # so that the loop waits for a trainer
    worker.start()
    taken(worker, 1)
    worker.stop()
    worker.stop()
    assert training.sync.ledger.leased == []
    with pytest.raises(LoRASyncError, match=r"The rollouts have ended.*trains once"):
        worker.check_health(60)


@of_115
@pytest.mark.outside
def test_an_interrupt_at_any_point_of_the_wait_for_a_sample_leaves_the_rollouts_able_to_end(
    training: FleetRun,
) -> None:
    """It could leave the lock of the queue taken, for which the rollouts waited for ever, with their requests."""
    interrupts = Interrupts({"queue", "threading"})
    while not interrupts.is_over:
        worker = worker_for(training, queue_maxsize=1)
        worker.start()
        taken(worker, 1)
        interrupts.call(partial(taken, worker, 1))
        time.sleep(0.3)  # the rollouts try to queue another sample
        worker.stop()
        with pytest.raises(LoRASyncError, match="The rollouts have ended"):
            worker.check_health(60)


@of_115
@pytest.mark.outside
def test_a_loop_that_hangs_is_an_error(training: FleetRun) -> None:
    worker = worker_for(training)
    worker.start()
    worker.check_health(60)
    ticking, worker._heartbeat = worker._heartbeat, SimpleNamespace(value=time.time() - 100)
    assert ticking.value > time.time() - 50
    with pytest.raises(LoRASyncError, match=r"nothing for 100 s, and heartbeat_stale_after_s=60 were allowed"):
        worker.check_health(60)
    worker.stop()


@pytest.mark.outside
@pytest.mark.parametrize(
    ("request_timeout", "generation_timeout", "named"),
    [(5, 20.0, "request_timeout"), (600, 20.0, "lora_sync_generation_timeout")],
)
def test_request_ends_by_the_shorter_of_two_settings(
    request_timeout: int, generation_timeout: float, named: str, training: FleetRun
) -> None:
    assert training.sync.settings.generation_timeout_s == generation_timeout
    deadline = worker_for(training, request_timeout=request_timeout).deadline()
    assert deadline.budget_s == min(request_timeout, generation_timeout)
    assert named in deadline.task


# The attention that stands in for a kernel


def test_attention_in_plain_torch_is_that_of_each_sequence_alone() -> None:
    torch.manual_seed(0)
    lengths = [(3, 3), (2, 5), (4, 4)]  # queries, and keys of which these are the last
    q = torch.randn(sum(queries for queries, _ in lengths), 4, 8)
    k, v = (torch.randn(sum(keys for _, keys in lengths), 2, 8) for _ in range(2))
    cu_q = torch.tensor([0, 3, 5, 9], dtype=torch.int32)
    cu_k = torch.tensor([0, 3, 8, 12], dtype=torch.int32)

    found = flash_attn_varlen_func(q, k, v, cu_q, cu_k, 4, 5, causal=True)

    for place, (queries, keys) in enumerate(lengths):
        for row in range(queries):
            seen = slice(int(cu_k[place]), int(cu_k[place]) + keys - queries + row + 1)
            query = q[int(cu_q[place]) + row].view(2, 2, 8)
            weights = torch.einsum("ghd,sgd->ghs", query, k[seen]).div(8**0.5).softmax(-1)
            alone = torch.einsum("ghs,sgd->ghd", weights, v[seen]).reshape(4, 8)
            torch.testing.assert_close(found[int(cu_q[place]) + row], alone)
