"""One decision for all processes, seen from a single one; several processes are in tests/distributed."""

import pickle
from types import SimpleNamespace

import pytest
from accelerate import Accelerator

from trl_lora_sync.distributed import _sendable, check_launch_arguments, check_launcher, run_on_main
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
    assert _sendable((None, error)) == (None, error)


def test_result_is_sent_as_it_is() -> None:
    assert _sendable(("result", None)) == ("result", None)


@pytest.mark.parametrize(
    ("error", "name"),
    [(NeedsTwoError("one", "two"), "NeedsTwoError: one"), (HoldsALambdaError("words"), "HoldsALambdaError: words")],
    ids=["cannot be unpickled", "cannot be pickled"],
)
def test_exception_that_does_not_pickle_is_sent_by_its_name_and_words(error: Exception, name: str) -> None:
    result, sent = pickle.loads(pickle.dumps(_sendable((None, error))))
    assert result is None
    assert isinstance(sent, RemoteProcessError)
    assert str(sent) == f"Process 0 failed with {name}"


def test_plain_data_parallelism_is_accepted(accelerator: Accelerator) -> None:
    check_launcher(accelerator)


@pytest.mark.parametrize(
    ("plugins", "words"),
    [
        (
            {"deepspeed_plugin": SimpleNamespace(zero_stage=3)},
            "does not support DeepSpeed ZeRO-3 yet.*Use ZeRO-2 or DDP",
        ),
        ({"fsdp_plugin": SimpleNamespace()}, "does not support FSDP yet.*Use DDP"),
    ],
    ids=["zero3", "fsdp"],
)
def test_sharded_training_is_refused(plugins: dict[str, object], words: str) -> None:
    with pytest.raises(UnsupportedSettingError, match=words) as caught:
        check_launcher(SimpleNamespace(state=SimpleNamespace(**plugins)))
    assert 'vllm_sync_strategy="weights"' in str(caught.value)


def test_zero_stage_2_is_accepted() -> None:
    check_launcher(SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=2))))


@pytest.mark.parametrize("fsdp", [True, ["full_shard"]])
def test_fsdp_in_the_arguments_is_refused_before_anything_is_loaded(fsdp: object) -> None:
    with pytest.raises(UnsupportedSettingError, match="does not support FSDP yet"):
        check_launch_arguments(SimpleNamespace(deepspeed_plugin=None, fsdp=fsdp))


def test_fsdp_chosen_by_accelerate_launch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(UnsupportedSettingError, match="Use DDP"):
        check_launch_arguments(SimpleNamespace(deepspeed_plugin=None, fsdp=False))


@pytest.mark.parametrize(("stage", "is_refused"), [(1, False), (2, False), (3, True)])
def test_only_zero_3_is_refused_of_deepspeed(stage: int, is_refused: bool) -> None:
    args = SimpleNamespace(deepspeed_plugin=SimpleNamespace(zero_stage=stage), fsdp=False)
    if is_refused:
        with pytest.raises(UnsupportedSettingError, match="DeepSpeed ZeRO-3"):
            check_launch_arguments(args)
    else:
        check_launch_arguments(args)
