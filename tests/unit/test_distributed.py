"""One decision for all processes, mostly seen from a single one; several processes are in tests/distributed."""

import datetime
import multiprocessing
import os
import pickle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import trl
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from make_model import make_model
from support.colocate import colocate_trainer
from trl.generation import vllm_generation

from trl_lora_sync import LoRASyncTrainer
from trl_lora_sync.collective.distributed import (
    check_launcher,
    check_layouts,
    check_same_start,
    run_on_all,
    run_on_main,
    sendable,
)
from trl_lora_sync.colocate import engine
from trl_lora_sync.colocate.engine import Policy, SamplingGate
from trl_lora_sync.colocate.generation import ColocateGeneration
from trl_lora_sync.errors import AdapterRejectedError, RemoteProcessError, UnsupportedSettingError


@pytest.fixture(scope="module")
def accelerator() -> Accelerator:
    return Accelerator(cpu=True)


class NeedsTwoError(Exception):
    """Pickles, but cannot be unpickled: its constructor wants more than its args hold."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one)
        self.two = two


class HoldsALambdaError(Exception):
    """Does not pickle at all."""

    def __init__(self, words: str) -> None:
        super().__init__(words)
        self.callback = lambda: None


def test_result_of_process_0_is_returned(accelerator: Accelerator) -> None:
    assert run_on_main(accelerator, lambda: {"a": 1}) == {"a": 1}
    assert run_on_main(accelerator, lambda: None) is None


@pytest.mark.parametrize("error", [ValueError("words"), KeyboardInterrupt(), NeedsTwoError("one", "two")], ids=repr)
def test_exception_of_process_0_is_raised_as_it_is(accelerator: Accelerator, error: BaseException) -> None:
    calls = []

    def act() -> None:
        calls.append(1)
        raise error

    with pytest.raises(type(error)) as caught:
        run_on_main(accelerator, act)
    assert caught.value is error
    assert calls == [1]


def test_cause_of_an_exception_is_kept_on_process_0(accelerator: Accelerator) -> None:
    def act() -> None:
        try:
            raise OSError("the cause")
        except OSError as cause:
            raise AdapterRejectedError("the effect") from cause

    with pytest.raises(AdapterRejectedError, match="the effect") as caught:
        run_on_main(accelerator, act)
    assert str(caught.value.__cause__) == "the cause"


def test_exception_that_pickles_is_sent_as_it_is() -> None:
    error = AdapterRejectedError("words")
    assert sendable((None, error)) == (None, error)


def test_result_is_sent_as_it_is() -> None:
    assert sendable(("result", None)) == ("result", None)


@pytest.mark.parametrize(
    ("error", "name"),
    [(NeedsTwoError("one", "two"), "NeedsTwoError: one"), (HoldsALambdaError("words"), "HoldsALambdaError: words")],
    ids=["cannot be unpickled", "cannot be pickled"],
)
def test_exception_that_does_not_pickle_is_sent_by_its_name_and_words(error: Exception, name: str) -> None:
    result, sent = pickle.loads(pickle.dumps(sendable((None, error))))
    assert result is None
    assert isinstance(sent, RemoteProcessError)
    assert str(sent) == f"Process 0 failed with {name}"


def test_own_result_and_own_exception_come_back_from_a_run_on_all(accelerator: Accelerator) -> None:
    error = ValueError("words")

    def fail() -> None:
        raise error

    assert run_on_all(accelerator, lambda: 3) == 3
    with pytest.raises(ValueError, match="words") as caught:
        run_on_all(accelerator, fail)
    assert caught.value is error


A_MATRIX = ((4, 2), "torch.float32", True)


@pytest.mark.parametrize(
    "regions",
    [[(0, 8), (8, 8)], [(0, 3), (3, 8)], [(0, 4), (4, 8), (0, 4), (4, 8)]],
    ids=["one holds all", "uneven", "replicas"],
)
def test_shards_that_make_up_a_matrix_are_accepted(regions: list[tuple[int, int]]) -> None:
    check_layouts([[(A_MATRIX, (region,))] for region in regions])


def test_blocks_of_a_matrix_are_accepted() -> None:
    layout = ((4, 2), "torch.float32", False)
    check_layouts([[(layout, ((0, 3), (0, 2)))], [(layout, ((3, 4), (0, 2)))]])


@pytest.mark.parametrize(
    "layouts",
    [
        [[(A_MATRIX, ((0, 4),))], [(A_MATRIX, ((4, 7),))]],
        [[(A_MATRIX, ((0, 5),))], [(A_MATRIX, ((4, 8),))]],
        [[(A_MATRIX, ((0, 4),))], [(((4, 2), "torch.bfloat16", True), ((4, 8),))]],
        [[(A_MATRIX, ((0, 8),))], []],
    ],
    ids=["an element is missing", "an element twice", "another dtype", "another number of matrices"],
)
def test_shards_that_do_not_fit_together_are_refused(layouts: list[list[tuple[Any, Any]]]) -> None:
    with pytest.raises(RemoteProcessError, match="do not make up whole matrices"):
        check_layouts(layouts)


def launcher(kind: DistributedType = DistributedType.DEEPSPEED, **zero: object) -> SimpleNamespace:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": zero})
    return SimpleNamespace(state=SimpleNamespace(distributed_type=kind, deepspeed_plugin=plugin))


def test_plain_data_parallelism_is_accepted(accelerator: Accelerator) -> None:
    check_launcher(accelerator)


@pytest.mark.parametrize("offload", [None, {"device": "none"}, {"device": "cpu"}])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_every_stage_of_zero_is_accepted(stage: int, offload: object) -> None:
    check_launcher(launcher(stage=stage, offload_param=offload))


def test_fsdp_is_accepted() -> None:
    check_launcher(launcher(DistributedType.FSDP))


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        (launcher(DistributedType.MEGATRON_LM), "does not support MEGATRON_LM"),
        (launcher(DistributedType.XLA), "does not support XLA"),
        (launcher(offload_param={"device": "nvme"}), "parameters offloaded to NVMe"),
    ],
    ids=["megatron", "xla", "nvme"],
)
def test_what_cannot_be_read_is_refused(accelerator: SimpleNamespace, words: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=words) as caught:
        check_launcher(accelerator)
    assert 'vllm_sync_strategy="weights"' in str(caught.value)


def processes(**plugin: bool) -> Any:
    """Two processes; under FSDP if `plugin` sets how it loads."""
    fields = {"cpu_ram_efficient_loading": False, "sync_module_states": False, **plugin}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**fields) if plugin else None)
    return SimpleNamespace(num_processes=2, state=state)


def test_processes_that_start_differently_are_refused_only_where_nothing_makes_them_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[tuple[int, ...]] = [(2, 3)]
    monkeypatch.setattr("trl_lora_sync.collective.distributed.gather_object", lambda mine: mine + others)
    with pytest.raises(UnsupportedSettingError, match=r"a mixture of them.*transformers\.set_seed\(0\)"):
        check_same_start(processes(sync_module_states=False), (1, 2))
    check_same_start(processes(sync_module_states=False), (2, 3))
    check_same_start(processes(sync_module_states=False), ())
    check_same_start(processes(sync_module_states=True), (1, 2))
    check_same_start(processes(cpu_ram_efficient_loading=True), (1, 2))
    check_same_start(processes(), (1, 2))


# Turns after tool calls, in colocate mode

TURNS = (2, 1)  # of each process


class LoopingTrainer(trl.GRPOTrainer):  # type: ignore[misc]
    """Takes so many turns in the place where TRL calls tools."""

    def _tool_call_loop(self, turns: int) -> list[list[int]]:
        return [self.vllm_generation.generate([[5, 6]], None, 1)[1][0] for _ in range(turns)]


class LoopingSyncTrainer(LoRASyncTrainer, LoopingTrainer):
    """The same with adapter sync."""


def start_engine(self: Any) -> None:
    """In the place of `_init_vllm`: what samples is a function that answers one token for each row."""

    def generate(rows: list[dict[str, Any]], **_: Any) -> list[Any]:
        outputs = [SimpleNamespace(token_ids=[7])]
        return [SimpleNamespace(prompt_token_ids=row["prompt_token_ids"], outputs=outputs) for row in rows]

    self.dtype_in = lambda form: torch.float32
    self.gate, self.llm = SamplingGate(lambda: None), SimpleNamespace(generate=generate)
    self.holder = SimpleNamespace(
        load=lambda *_: Policy("version", 1, None), check=lambda _: None, activate=lambda _: None
    )


def take_turns(index: int, model: Path, folder: Path, results: Any) -> None:
    """What one of two processes does, before both gather how long their completions are."""
    torch.set_num_threads(1)  # a fork has none of the threads that torch has started
    os.environ |= {"OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", "RANK": str(index), "LOCAL_RANK": str(index)}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}  # accelerate requires them, and the store is a file
    AcceleratorState._reset_state(reset_partial_state=True)  # of the tests before
    store = torch.distributed.FileStore(str(folder / "store"), 2)
    torch.distributed.init_process_group(
        "gloo", store=store, rank=index, world_size=2, timeout=datetime.timedelta(seconds=30)
    )
    trainer = colocate_trainer(model, folder / str(index), trainer_class=LoopingSyncTrainer, lora_sync_verify="off")
    trainer.vllm_generation.generate([[1], [2]], None, 2)
    completions = trainer._tool_call_loop(TURNS[index])
    results.send((index, completions, trainer.accelerator.gather(torch.tensor([10 + index])).tolist()))


@pytest.mark.outside
def test_a_process_may_take_more_turns_with_tools_than_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waited in another collective while the others gathered lengths, where TRL's own colocate mode runs."""
    monkeypatch.setattr(engine, "installed_version", lambda: "0.31.0")
    monkeypatch.setattr(ColocateGeneration, "_init_vllm", start_engine)
    for name, value in {"LLM": None, "SamplingParams": dict, "extract_logprobs": lambda _: (None, None)}.items():
        monkeypatch.setattr(vllm_generation, name, value, raising=False)
    model, context = make_model(tmp_path / "model"), multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    children = [context.Process(target=take_turns, args=(index, model, tmp_path, sender)) for index in (0, 1)]
    for child in children:
        child.start()
    try:
        for child in children:
            child.join(60)
        assert [child.exitcode for child in children] == [0, 0]
        results = []
        for _ in children:
            assert receiver.poll(30), "nothing was sent"
            results.append(receiver.recv())
        assert sorted(results) == [(index, [[7]] * TURNS[index], [10, 11]) for index in (0, 1)]
    finally:
        for child in children:
            child.kill()
            child.join(30)
