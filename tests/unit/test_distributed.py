"""One decision for all processes, seen from a single one; several processes are in tests/distributed."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate import Accelerator
from accelerate.utils import DistributedType

from trl_lora_sync.distributed import (
    check_launcher,
    check_layouts,
    check_same_start,
    run_on_all,
    run_on_main,
    sendable,
)
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
    """Two processes; under FSDP if `plugin` says how it loads."""
    fields = {"cpu_ram_efficient_loading": False, "sync_module_states": False, **plugin}
    state = SimpleNamespace(fsdp_plugin=SimpleNamespace(**fields) if plugin else None)
    return SimpleNamespace(num_processes=2, state=state)


def test_processes_that_start_differently_are_refused_only_where_nothing_makes_them_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    others: list[tuple[int, ...]] = [(2, 3)]
    monkeypatch.setattr("trl_lora_sync.distributed.gather_object", lambda mine: mine + others)
    with pytest.raises(UnsupportedSettingError, match=r"a mixture of them.*transformers\.set_seed\(0\)"):
        check_same_start(processes(sync_module_states=False), (1, 2))
    check_same_start(processes(sync_module_states=False), (2, 3))
    check_same_start(processes(sync_module_states=False), ())
    check_same_start(processes(sync_module_states=True), (1, 2))
    check_same_start(processes(cpu_ram_efficient_loading=True), (1, 2))
    check_same_start(processes(), (1, 2))
