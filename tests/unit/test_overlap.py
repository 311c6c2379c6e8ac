"""Unit tier: batches sampled ahead on several fake servers, the lease on their version, and how all of that ends."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trl
from contract.served import SMALL, sampling, soon
from datasets import Dataset
from peft import LoraConfig
from support.interrupts import Interrupts

from trl_lora_sync import GRPOConfig, GRPOTrainer, LoRASyncConfig, LoRASyncTrainer, RLOOConfig
from trl_lora_sync.checks.listed import CHECKS
from trl_lora_sync.checks.subject import Expected, Subject
from trl_lora_sync.engines.base import TIMEOUTS, Capabilities, Completion, PromptGroup
from trl_lora_sync.errors import (
    GenerationError,
    LoRASyncError,
    ServerSetupError,
    UnsupportedSettingError,
    UnsupportedTRLError,
)
from trl_lora_sync.generation.overlap import BatchFigures, Overlap, start_sentence
from trl_lora_sync.runtime import run as run_on_loop
from trl_lora_sync.settings import ServerAddress, SyncSettings
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, in_memory_engines
from trl_lora_sync.trl_checks import check_overlap
from unit.fleets import GROUPS, FleetRun, InMemoryRun, settings_for, small_adapter

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
from trl.experimental.gmpo import GMPOTrainer

pytestmark = pytest.mark.outside

AT_ONCE_S = 10.0
OTHERS = [replace(group, prompt=[*group.prompt, 7]) for group in GROUPS]
Start = Callable[..., tuple[FleetRun, Overlap]]


@pytest.fixture(autouse=True)
def _brief_hiccups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(TIMEOUTS), "retry_s", 0.2)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts fakes, a run on them with its first version, and what samples ahead."""
    with ExitStack() as stack:

        def begin(servers: int = 2, **settings: Any) -> tuple[FleetRun, Overlap]:
            fakes = [stack.enter_context(FakeSGLang(shapes=SMALL)) for _ in range(servers)]
            settings = {"overlap": True, **settings}
            run = FleetRun(AdapterSync(settings_for(fakes, tmp_path / "sync", **settings)), fakes)
            overlap = Overlap(run.sync)
            stack.callback(run.sync.close)
            stack.callback(overlap.cancel)
            run.start()
            run.publish()
            return run, overlap

        yield begin


def batch(overlap: Overlap, groups: list[PromptGroup], following: list[PromptGroup] | None) -> list[list[Completion]]:
    try:
        return overlap.sample(groups, sampling(), following)
    finally:
        overlap.end_batch()


def sample_slowly_ahead(run: FleetRun, overlap: Overlap) -> None:
    """Take a batch, and have the next one take seconds, as a busy host may look at it late."""
    for fake in run.fakes:
        fake.token_delay_s = 0.05
    batch(overlap, OTHERS, GROUPS)
    for fake in run.fakes:
        fake.token_delay_s = 1.0


def wait_until_sampling(run: FleetRun, tokens: int = 1) -> None:
    for fake in run.fakes:
        fake.wait_until(lambda fake=fake: fake.running >= tokens)


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_a_batch_is_of_the_version_that_was_newest_when_the_one_before_was_taken(start: Start, transport: str) -> None:
    run, overlap = start(transport=transport)
    assert run.is_policy_of(batch(overlap, GROUPS, GROUPS), run.read[-1])
    assert overlap.figures is not None
    assert (overlap.figures.version_lag, overlap.figures.hidden) == (0, 0.0)
    for _ in range(3):
        first = run.read[-1]
        run.publish()
        assert run.is_policy_of(batch(overlap, GROUPS, GROUPS), first)
        assert overlap.figures.version_lag == 1


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_a_leased_version_stays_on_every_server_and_is_retired_after_it(start: Start, transport: str) -> None:
    run, overlap = start(transport=transport, keep=2)
    batch(overlap, GROUPS, OTHERS)
    overlap.settle()
    for _ in range(4):
        run.publish()
    run.wait_for_unloads()
    assert run.adapters() == [["v1", "v4", "v5"]] * 2

    batch(overlap, OTHERS, None)
    run.publish()
    run.wait_for_unloads()

    assert run.sync.ledger.leased == []
    assert run.adapters() == [["v5", "v6"]] * 2


def test_all_turns_of_a_batch_are_of_the_version_of_its_first(start: Start) -> None:
    run, overlap = start()
    batch(overlap, OTHERS, GROUPS)
    first = run.read[-1]
    for _ in range(2):
        run.publish()
        assert run.is_policy_of(overlap.sample(GROUPS, sampling(), None), first)  # the batch, and a turn with tools
    run.publish()
    assert run.is_policy_of(overlap.sample(GROUPS, sampling(), None), first)
    overlap.end_batch()
    assert run.is_policy_of(batch(overlap, GROUPS, None), run.read[-1])


def test_a_lease_whose_taker_was_interrupted_ends_with_the_run(tmp_path: Path) -> None:
    """The next training gave each server that version, although its files were deleted."""
    with in_memory_engines(shapes=SMALL) as [engine]:
        training = InMemoryRun([engine], tmp_path, overlap=True)
        overlap = Overlap(training.sync)
        interrupts = Interrupts({"trl_lora_sync.servers.ledger", "trl_lora_sync.generation.overlap"})
        while not interrupts.is_over:
            interrupts.call(lambda: batch(overlap, GROUPS, OTHERS))
            overlap.cancel()
            training.sync.close()
            engine.calls.clear()
            name = training.sync.publish(small_adapter(interrupts.place)).adapter_name
            assert [loaded for method, loaded in engine.calls if method == "load"] == [name]
        training.sync.shutdown()


@pytest.mark.parametrize("transport", ["disk", "tensors"])
def test_a_server_that_restarts_is_given_the_version_that_is_sampled_ahead_and_the_active_one(
    start: Start, transport: str
) -> None:
    run, overlap = start(transport=transport)
    sample_slowly_ahead(run, overlap)
    first = run.read[-1]
    run.publish()
    wait_until_sampling(run)
    run.fakes[1].restart()
    for fake in run.fakes:
        fake.token_delay_s = 0.0

    assert run.is_policy_of(batch(overlap, GROUPS, None), first)

    assert run.adapters()[0] == ["v1", "v2"]
    # The active one comes first, and the other is needless if the first server did the batch meanwhile.
    assert sorted(run.adapters()[1]) in ([], ["v2"], ["v1", "v2"])
    assert run.is_policy_of(run.generate())


def test_a_single_server_that_restarts_goes_on_with_the_same_version(start: Start) -> None:
    run, overlap = start(1)
    sample_slowly_ahead(run, overlap)
    first = run.read[-1]
    run.publish()
    wait_until_sampling(run)
    run.fakes[0].restart()
    run.fakes[0].token_delay_s = 0.0

    assert run.is_policy_of(batch(overlap, GROUPS, None), first)

    assert sorted(run.adapters()[0]) == ["v1", "v2"]


# Its end


def test_cancelling_ends_the_requests_at_once_and_leaves_nothing(start: Start, tmp_path: Path) -> None:
    run, overlap = start()
    for fake in run.fakes:
        fake.token_delay_s = 100.0
    overlap.request(GROUPS, sampling())
    wait_until_sampling(run)

    started = time.monotonic()
    overlap.cancel()
    run.sync.close()

    assert time.monotonic() - started < AT_ONCE_S
    for fake in run.fakes:
        fake.wait_until(lambda fake=fake: not fake.running)
    assert run.sync.ledger.leased == []
    assert run.adapters() == [[], []]
    assert not (tmp_path / "sync").exists()


def test_an_error_is_raised_when_the_batch_is_taken_and_the_lease_is_over(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, overlap = start(1)
    generate = run.sync.fleet.generate

    async def refuse(*args: Any) -> Any:
        raise GenerationError("not this one")

    monkeypatch.setattr(run.sync.fleet, "generate", refuse)
    overlap.request(GROUPS, sampling())
    overlap.settle()
    monkeypatch.setattr(run.sync.fleet, "generate", generate)
    run.publish()
    with pytest.raises(GenerationError, match="not this one"):
        batch(overlap, GROUPS, None)
    assert run.sync.ledger.leased == []
    assert run.is_policy_of(batch(overlap, GROUPS, None))


def test_other_prompts_are_sampled_now_from_the_newest_version(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    run, overlap = start()
    batch(overlap, GROUPS, OTHERS)
    run.publish()

    assert run.is_policy_of(batch(overlap, GROUPS, None), run.read[-1])

    assert overlap.figures is not None
    assert overlap.figures.version_lag == 0
    assert "Other prompts or sampling settings are due" in caplog.text
    assert run.sync.ledger.leased == []


def test_an_interrupt_of_the_wait_leaves_the_batch_to_be_cancelled(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, overlap = start(1)
    run.fakes[0].token_delay_s = 100.0
    overlap.request(GROUPS, sampling())
    wait_until_sampling(run)
    with monkeypatch.context() as patch:
        patch.setattr("trl_lora_sync.runtime.Task.wait", lambda task: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            batch(overlap, GROUPS, None)
    started = time.monotonic()
    overlap.cancel()
    assert time.monotonic() - started < AT_ONCE_S
    assert run.sync.ledger.leased == []


def test_what_was_hidden_is_the_share_that_was_not_waited_for() -> None:
    def hidden(wait_s: float, generation_s: float, lag: int = 1) -> float:
        return BatchFigures(version_lag=lag, wait_s=wait_s, generation_s=generation_s).hidden

    assert hidden(0.5, 2.0) == 0.75
    assert hidden(2.5, 2.0) == 0.0
    assert hidden(0.0, 0.0) == 0.0
    assert hidden(0.0, 2.0, lag=0) == 0.0


# What is refused before a model is loaded


@pytest.fixture
def arguments(tmp_path: Path) -> dict[str, Any]:
    """Arguments of a trainer whose model does not exist, so that it fails as soon as it tries to load."""
    config = GRPOConfig(
        output_dir=str(tmp_path / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        use_vllm=True,
        vllm_mode="server",
        vllm_sync_strategy="lora_adapter",
        lora_sync_overlap=1,
    )
    return {
        "model": str(tmp_path / "no" / "such" / "model"),
        "args": config,
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
        "train_dataset": Dataset.from_list([{"prompt": "a"}]),
        "peft_config": LoraConfig(),
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"rollout_func": lambda prompts, trainer: {}}, "rollout_func cannot be used with lora_sync_overlap=1"),
        ({"environment_factory": SimpleNamespace}, "environment_factory cannot be used with lora_sync_overlap=1"),
    ],
)
def test_arguments_that_decide_what_is_sampled_are_refused(
    given: dict[str, Any], words: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises(UnsupportedSettingError, match=f"{words}.*Set lora_sync_overlap=0"):
        GRPOTrainer(**arguments, **given)


def test_tools_with_fused_serving_are_refused(arguments: dict[str, Any]) -> None:
    arguments["args"].lora_sync_serving = "fused"
    with pytest.raises(UnsupportedSettingError, match=r"tools with lora_sync_serving=.*one version"):
        GRPOTrainer(**arguments, tools=[print])


def test_trainers_without_the_correction_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedSettingError, match=r"RLOOConfig cannot be used with lora_sync_overlap=1.*GRPO and"):
        RLOOConfig(
            output_dir=str(tmp_path),
            use_vllm=True,
            vllm_mode="server",
            vllm_sync_strategy="lora_adapter",
            lora_sync_overlap=1,
            use_cpu=True,
            bf16=False,
        )


def test_a_trainer_that_is_no_subclass_of_grpo_is_refused() -> None:
    class Other(LoRASyncTrainer, trl.RLOOTrainer):  # type: ignore[misc]
        pass

    with pytest.raises(UnsupportedSettingError, match="Other cannot be used with lora_sync_overlap=1"):
        check_overlap(Other)
    check_overlap(GRPOTrainer)
    assert issubclass(GRPOConfig, LoRASyncConfig)


def test_a_subclass_whose_loss_does_not_apply_the_correction_is_refused() -> None:
    """GMPO trained on samples of an earlier policy as if they were of the newest."""

    class GMPO(LoRASyncTrainer, GMPOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    class Same(GRPOTrainer):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return super()._compute_loss(model, inputs)

    class Correcting(GMPO):
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            return (inputs["importance_sampling_ratio"] * inputs["advantages"]).mean()

    with pytest.raises(UnsupportedSettingError, match="GMPO cannot be used with lora_sync_overlap=1: its loss does"):
        check_overlap(GMPO)
    check_overlap(Same)
    check_overlap(Correcting)


def test_a_loss_that_takes_the_place_of_trls_is_looked_at_under_either_name() -> None:
    """Transformers calls `compute_loss`, and only TRL's calls `_compute_loss`."""

    class Own(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self.weighted(inputs)

        def weighted(self, inputs: Any) -> Any:
            return inputs["advantages"].mean()

    class Correcting(Own):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            return self.weighted(inputs)

        def weighted(self, inputs: Any) -> Any:
            return (inputs["importance_sampling_ratio"] * inputs["advantages"]).mean()

    class Logging(GRPOTrainer):
        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            print(inputs["importance_sampling_ratio"])
            return super().compute_loss(model, inputs, *args, **kwargs)

    class LoggingGMPO(Logging, GMPOTrainer):  # type: ignore[misc]
        pass

    for one in (Own, LoggingGMPO):
        with pytest.raises(UnsupportedSettingError, match=f"{one.__name__} cannot be used .*: its loss does not apply"):
            check_overlap(one)
    check_overlap(Correcting)
    check_overlap(Logging)


@pytest.mark.parametrize(
    ("name", "function", "words"),
    [
        ("_prepare_inputs", lambda self, batch: None, "_prepare_inputs takes no generation_batch"),
        ("_tokenize_prompts", None, "there is no GRPOTrainer._tokenize_prompts"),
        ("_prepare_inputs", lambda self, generation_batch: None, "has no if self._step % generate_every"),
    ],
)
def test_a_trl_that_samples_at_another_time_is_refused(
    name: str, function: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl.GRPOTrainer, name, function)
    with pytest.raises(UnsupportedTRLError, match=words):
        check_overlap(GRPOTrainer)


@pytest.mark.parametrize(
    ("served", "words"),
    [
        ({"max_loras": 1}, r"--max-loras 1, .*`trl-lora-sync serve vllm Q [^`]*-- --max-loras 2`"),
        (
            {"max_loras": 1, "engine": "sglang"},
            r"--max-loras-per-batch 2, .*`trl-lora-sync serve sglang Q [^`]*-- --max-loras-per-batch 3`",
        ),
        ({"keeps_adapters_apart": False, "version": "0.25.1"}, r"vllm 0.25.1, which may mix up.*vLLM 0.26"),
        ({"max_loras": 1, "is_fused": True}, None),
        ({"max_loras": 2}, None),
        ({"max_loras": None}, None),
    ],
)
def test_a_server_that_cannot_load_while_it_samples_is_refused(
    served: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    fields = {"engine": "vllm", "version": "0.31.0", "base_model": "Q", "base_root": "Q", "max_model_len": None}
    capabilities = Capabilities(**{**fields, "logprobs_mode": "unknown", **served})
    engine = SimpleNamespace(base_url="http://127.0.0.1:8000", capabilities=capabilities, retries=0)

    def error(overlap: bool) -> LoRASyncError | None:
        settings: SyncSettings = settings_for([], tmp_path, overlap=overlap)
        address = ServerAddress(base_url=engine.base_url, is_local=True)
        server: Any = SimpleNamespace(base_url=engine.base_url, engine=engine, settings=settings, address=address)
        [check] = [check for check in CHECKS if check.name == "room for adapters"]
        found = run_on_loop(check(Subject(server, Expected(), None), soon()))
        return found and found.error

    assert error(overlap=False) is None
    refused = error(overlap=True)
    if words is None:
        assert refused is None
    else:
        assert isinstance(refused, ServerSetupError)
        assert re.search(f"{words}.*set lora_sync_overlap=0", str(refused))


@pytest.mark.parametrize("mode", ["sequence_mask", "token_truncate", "token_mask", "sequence_truncate"])
def test_the_sentence_at_the_start_names_both_modes_and_the_one_that_is_set(mode: str) -> None:
    sentence = start_sentence(mode)
    assert all(f'"{name}"' in sentence for name in (mode, "sequence_mask", "token_truncate"))
    assert "one generation batch earlier" in sentence
