"""Any request to the engine in the trainer's process gets the active version, or an error; failed syncs change nothing.

The tests share one trainer. Each begins with its own adapter.
"""

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.colocate import (
    OTHER_POLICY,
    answered,
    base_distance,
    check_versions_after_inference_mode,
    colocate_trainer,
    is_exact,
    rows_of,
    samples_policy,
)
from support.models import randomize_adapter
from support.policies import distance, sample, token_ids
from support.vision import picture

from trl_lora_sync.checks.verify import Scores
from trl_lora_sync.colocate import engine
from trl_lora_sync.colocate.slots import AdapterSlots
from trl_lora_sync.errors import (
    AdapterNotFiniteError,
    AdapterRejectedError,
    GenerationError,
    VerificationError,
    WrongPolicyError,
)

SEEDS = itertools.count(1)
ASKED = [token_ids(1), token_ids(2), token_ids(3)]


@pytest.fixture(scope="module")
def shared(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    trainer = colocate_trainer(base_model, tmp_path_factory.mktemp("sampling"), max_steps=1)
    trainer.model.eval()
    yield trainer
    trainer.vllm_generation.close()


@pytest.fixture
def trainer(shared: Any) -> Any:
    """The shared trainer with an adapter that no earlier test had, which is the active version."""
    change(shared)
    shared.vllm_generation.sync_weights()
    return shared


def change(trainer: Any) -> None:
    randomize_adapter(trainer.model, seed=next(SEEDS))


def version(trainer: Any) -> int:
    return int(trainer.vllm_generation.active_name.removeprefix("version-"))


# Every way to make a request


def test_generate_of_the_engine_samples_from_the_active_version(trainer: Any) -> None:
    rows = answered(trainer.vllm_generation.llm, ASKED)
    assert is_exact(trainer.model, rows)
    assert base_distance(trainer.model, rows) > OTHER_POLICY


def test_chat_of_the_engine_samples_from_the_active_version(trainer: Any) -> None:
    from vllm import SamplingParams

    [output] = trainer.vllm_generation.llm.chat(
        [{"role": "user", "content": "hello"}],
        SamplingParams(max_tokens=12, logprobs=0, ignore_eos=True),
        use_tqdm=False,
    )
    assert is_exact(trainer.model, rows_of([output]))


def test_prompt_logprobs_are_those_of_the_active_version(trainer: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, prompt_logprobs=0)
    [output] = trainer.vllm_generation.llm.generate([{"prompt_token_ids": ASKED[0]}], params, use_tqdm=False)
    served = [row[token].logprob for row, token in zip(output.prompt_logprobs[1:], ASKED[0][1:], strict=True)]
    assert is_exact(trainer.model, [(ASKED[0][:1], ASKED[0][1:], torch.tensor(served))])


def test_several_completions_of_one_prompt_are_all_from_the_active_version(trainer: Any) -> None:
    from vllm import SamplingParams

    params = SamplingParams(n=3, max_tokens=8, logprobs=0, ignore_eos=True)
    [output] = trainer.vllm_generation.llm.generate([{"prompt_token_ids": ASKED[0]}], params, use_tqdm=False)
    rows = [
        (ASKED[0], list(one.token_ids), torch.tensor([next(iter(place.values())).logprob for place in one.logprobs]))
        for one in output.outputs
    ]
    assert len(rows) == 3
    assert is_exact(trainer.model, rows)


def test_images_for_a_model_without_an_image_token_are_refused(trainer: Any) -> None:
    with pytest.raises(GenerationError, match="needs the model's image token"):
        trainer.vllm_generation.generate(ASKED[:1], [[picture(1)]], num_generations=1)


def test_trls_completions_are_not_decoded(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM decoded each token twice, for a quarter of the sampling of a tiny model, and nothing read the text."""
    outputs = recorded(trainer.vllm_generation.llm, monkeypatch)
    assert is_exact(trainer.model, sample(trainer.vllm_generation, ASKED))
    assert [one.text for output in outputs for one in output.outputs] == ["", "", ""]
    assert trainer.vllm_generation.generation_kwargs == {}
    answered(trainer.vllm_generation.llm, ASKED)  # as a rollout function does, which may read the text
    assert all(one.text for output in outputs[3:] for one in output.outputs)


def test_stop_strings_of_generation_kwargs_end_a_completion(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    generation = trainer.vllm_generation
    outputs = recorded(generation.llm, monkeypatch)
    monkeypatch.setattr(generation, "temperature", 0.0)  # so that both are the same, up to the stop string

    def completion(**given: Any) -> Any:
        monkeypatch.setattr(generation, "generation_kwargs", {"ignore_eos": True, **given})
        generation.generate(ASKED[:1], None, num_generations=1)
        return outputs[-1].outputs[0]

    whole = completion(detokenize=True)
    # An ASCII character is one token here, and other bytes are text only together.
    stop = next(one for one in whole.text[1:-1] if one.isascii())
    stopped = completion(stop=[stop])
    assert (whole.stop_reason, stopped.stop_reason) == (None, stop)
    assert len(stopped.token_ids) < len(whole.token_ids)


def recorded(llm: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `llm.generate()` returns from now on."""
    outputs: list[Any] = []
    generate = llm.generate

    def call(*args: Any, **kwargs: Any) -> Any:
        answer = generate(*args, **kwargs)
        outputs.extend(answer)
        return answer

    monkeypatch.setattr(llm, "generate", call)
    return outputs


def raw_request(llm: Any) -> None:
    from vllm import SamplingParams

    llm.llm_engine.add_request("by-hand", {"prompt_token_ids": ASKED[0]}, SamplingParams(max_tokens=4))


def several_raw_requests(llm: Any) -> None:
    from vllm import SamplingParams

    llm.llm_engine.add_request("by-hand", {"prompt_token_ids": ASKED[0]}, SamplingParams(n=2, max_tokens=4))


def enqueue(llm: Any) -> None:
    if not hasattr(llm, "enqueue"):
        pytest.skip("this vLLM has no LLM.enqueue()")
    llm.enqueue([{"prompt_token_ids": ids} for ids in ASKED], use_tqdm=False)


def enqueue_chat(llm: Any) -> None:
    if not hasattr(llm, "enqueue_chat"):
        pytest.skip("this vLLM has no LLM.enqueue_chat()")
    llm.enqueue_chat([{"role": "user", "content": "hello"}], use_tqdm=False)


def beam_search(llm: Any) -> None:
    from vllm.sampling_params import BeamSearchParams

    llm.beam_search([{"prompt_token_ids": ASKED[0]}], BeamSearchParams(beam_width=2, max_tokens=3))


@pytest.mark.parametrize("ask", [raw_request, several_raw_requests, enqueue, enqueue_chat, beam_search])
def test_other_ways_to_ask_are_refused_and_leave_nothing_behind(ask: Callable[[Any], None], trainer: Any) -> None:
    llm = trainer.vllm_generation.llm
    with pytest.raises(WrongPolicyError, match=r"other than through trainer.vllm_generation.llm.generate\(\) or"):
        ask(llm)
    assert not llm.llm_engine.has_unfinished_requests()
    assert samples_policy(trainer)


def test_request_for_another_adapter_is_refused_and_leaves_nothing_behind(trainer: Any, tmp_path: Path) -> None:
    from vllm.lora.request import LoRARequest

    llm = trainer.vllm_generation.llm
    with pytest.raises(WrongPolicyError, match=r"the adapter 'other', which is not.*Leave lora_request out"):
        answered(llm, ASKED, lora_request=LoRARequest("other", 1, str(tmp_path)))
    with pytest.raises(WrongPolicyError, match="names the adapter 'other'"):
        answered(llm, ASKED, lora_request=[None, LoRARequest("other", 9, str(tmp_path)), None])
    assert not llm.llm_engine.has_unfinished_requests()
    assert samples_policy(trainer)


def test_weights_that_change_without_a_step_are_published_whoever_asks_first(trainer: Any) -> None:
    before = version(trainer)
    change(trainer)
    rows = answered(trainer.vllm_generation.llm, ASKED)
    assert is_exact(trainer.model, rows)
    assert version(trainer) == before + 1
    change(trainer)
    assert is_exact(trainer.model, sample(trainer.vllm_generation, ASKED))
    assert version(trainer) == before + 2


def test_unchanged_weights_are_not_published_again(trainer: Any) -> None:
    before = version(trainer)
    assert samples_policy(trainer)
    assert version(trainer) == before


def test_before_the_first_sync_and_after_the_last_the_engine_syncs_by_itself(trainer: Any) -> None:
    trainer.vllm_generation.close()  # as at the end of train(), and the same state as before it
    rows = answered(trainer.vllm_generation.llm, ASKED)
    assert is_exact(trainer.model, rows)
    assert base_distance(trainer.model, rows) > OTHER_POLICY


def test_versions_follow_one_that_was_loaded_in_inference_mode(trainer: Any) -> None:
    """The next sync raised an error of torch, as it writes to memory of the first one."""
    check_versions_after_inference_mode(trainer, ASKED, change)


def test_request_before_the_first_sync_is_refused_where_other_processes_must_take_part(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    generation = trainer.vllm_generation
    generation.close()
    with monkeypatch.context() as patch:
        patch.setattr(type(trainer.accelerator), "num_processes", 2)
        with pytest.raises(WrongPolicyError, match=r"before the adapter did.*Call trainer.vllm_generation.sync_weig"):
            answered(generation.llm, ASKED)
    assert samples_policy(trainer)


def test_kv_cache_can_be_given_back_after_an_answer(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM keeps a finished request until its next step, and refuses to release the memory until then."""
    llm = trainer.vllm_generation.llm
    core = llm.llm_engine.engine_core.engine_core
    discarded: list[tuple[str, ...]] = []
    # A CPU build has no memory to discard, but vLLM's rule comes before that.
    monkeypatch.setattr(core.model_executor, "discard", discarded.append)
    monkeypatch.setattr(llm.llm_engine.vllm_config.model_config, "enable_sleep_mode", True)
    memory = engine.KVCacheMemory(llm)
    memory.release()
    for _ in range(2):
        with memory.there():
            assert is_exact(trainer.model, answered(llm, ASKED))
    memory.restore()
    assert discarded == [("kv_cache",)] * 3
    assert samples_policy(trainer)


# The prefix cache


def test_cached_prefixes_never_cross_versions(trainer: Any) -> None:
    """Sampled log-probabilities, as vLLM does not read the cache for the prompt's."""
    prefix = token_ids(7, 300)
    asked = [prefix + token_ids(seed, 5) for seed in range(3)]
    for _ in range(4):  # each slot twice
        change(trainer)
        for _ in range(2):  # the second reads what the first has cached
            assert is_exact(trainer.model, answered(trainer.vllm_generation.llm, asked))


def test_prefixes_are_cached_within_a_version(trainer: Any) -> None:
    """Shows that the test above could fail."""
    from vllm import SamplingParams

    prompt = token_ids(8, 300)
    llm = trainer.vllm_generation.llm
    cached = []
    for _ in range(2):
        [output] = llm.generate([{"prompt_token_ids": prompt}], SamplingParams(max_tokens=2), use_tqdm=False)
        cached.append(output.num_cached_tokens)
    assert cached[0] == 0
    assert cached[1] >= 128


# Interrupts and errors


class Interrupted(BaseException):
    pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, Interrupted])
@pytest.mark.parametrize("steps", [0, 1, 3])
def test_error_between_two_steps_leaves_no_request_behind(
    error: type[BaseException], steps: int, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = trainer.vllm_generation.llm
    step, left = llm.llm_engine.step, iter(range(steps))

    def interrupted() -> Any:
        if next(left, None) is None:
            raise error("now")
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(error, match="now"):
        answered(llm, ASKED)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    other = [token_ids(11), token_ids(12)]
    rows = answered(llm, other)
    assert [row[0] for row in rows] == other
    assert is_exact(trainer.model, rows)
    assert samples_policy(trainer)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_error_between_computing_and_drawing_leaves_an_engine_that_goes_on(
    error: type[BaseException], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call after it, and each training, ended in "State error: sample_tokens() must be called"."""
    llm = trainer.vllm_generation.llm

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise error("now")

    with monkeypatch.context() as patch:
        patch.setattr(llm.llm_engine.model_executor, "sample_tokens", interrupted)
        with pytest.raises(error, match="now"):
            answered(llm, ASKED)
    assert samples_policy(trainer)


@pytest.mark.parametrize("of", ["llm_engine.abort_request", "llm_engine.engine_core.abort_requests"])
def test_two_interrupts_in_a_row_leave_no_request_behind(
    of: str, trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next call got the answers of both calls, and gave the first ones out as its own."""
    llm = trainer.vllm_generation.llm
    owner, _, name = of.rpartition(".")

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine.model_runner(llm), "execute_model", interrupted)
        patch.setattr(operator.attrgetter(owner)(llm), name, interrupted)
        with pytest.raises(KeyboardInterrupt):
            answered(llm, ASKED)
    change(trainer)
    other = [token_ids(11), token_ids(12)]
    rows = answered(llm, other)
    assert [row[0] for row in rows] == other
    assert is_exact(trainer.model, rows)
    assert samples_policy(trainer)


def test_prompt_that_was_not_computed_because_of_an_error_is_not_taken_from_the_cache(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = trainer.vllm_generation.llm
    prompt = token_ids(13, 300)
    runner = engine.model_runner(llm)

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(runner, "execute_model", fails)
    with pytest.raises(RuntimeError, match="out of memory"):
        answered(llm, [prompt])
    monkeypatch.undo()
    assert is_exact(trainer.model, answered(llm, [prompt]))
    assert samples_policy(trainer)


# Failed syncs


@pytest.fixture
def previous(trainer: Any) -> tuple[int, dict[str, torch.Tensor]]:
    """The active version, and its adapter."""
    return version(trainer), {
        name: value.detach().clone() for name, value in trainer.model.named_parameters() if "lora_" in name
    }


def restore(trainer: Any, adapter: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, value in trainer.model.named_parameters():
            if name in adapter:
                value.copy_(adapter[name])


def not_finite(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    next(value for name, value in trainer.model.named_parameters() if "lora_B" in name).data[0, 0] = float("nan")
    return AdapterNotFiniteError


def damaged_slot(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """One bit of one value is another one once the adapter has been copied into the slot."""
    generation = trainer.vllm_generation
    copy, target = torch._foreach_copy_, generation.holder.copies[generation.idle_id()].targets[3]

    def damaged(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        copy(targets, sources)
        if any(one is target for one in targets):
            target.view(torch.int32).view(-1)[5] ^= 1

    monkeypatch.setattr(torch, "_foreach_copy_", damaged)
    return VerificationError


def lost_copy(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """One matrix never arrives in the slot."""
    generation = trainer.vllm_generation
    copy, target = torch._foreach_copy_, generation.holder.copies[generation.idle_id()].targets[4]

    def incomplete(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        pairs = [pair for pair in zip(targets, sources, strict=True) if pair[0] is not target]
        copy(*map(list, zip(*pairs, strict=True)))

    monkeypatch.setattr(torch, "_foreach_copy_", incomplete)
    return VerificationError


def contradiction(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """The engine computes something else with the version than the trainer."""
    generation, scores = trainer.vllm_generation, trainer.vllm_generation.scores

    def others(*args: Any) -> Scores:
        found = scores(*args)
        return replace(found, adapted=[value - 0.5 for value in found.adapted])

    monkeypatch.setattr(generation, "settings", replace(generation.settings, verify="every"))
    monkeypatch.setattr(generation, "scores", others)
    return VerificationError


def refused_file(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    """vLLM's own loading fails."""
    generation = trainer.vllm_generation
    monkeypatch.setattr(generation.holder, "copies", {})

    def refuse(request: Any) -> None:
        raise ValueError("no room")

    monkeypatch.setattr(generation.llm.llm_engine, "add_lora", refuse)
    return AdapterRejectedError


@pytest.mark.parametrize("fault", [not_finite, damaged_slot, lost_copy, contradiction, refused_file])
def test_failed_sync_leaves_the_previous_version_and_the_next_one_works(
    fault: Callable[..., type[Exception]],
    trainer: Any,
    previous: tuple[int, dict[str, torch.Tensor]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    active, adapter = previous
    change(trainer)
    error = fault(trainer, monkeypatch)
    with pytest.raises(error):
        trainer.vllm_generation.sync_weights()
    with pytest.raises(error):  # neither is anything sampled that is not the policy
        answered(trainer.vllm_generation.llm, ASKED)
    assert version(trainer) == active
    restore(trainer, adapter)
    assert samples_policy(trainer)
    assert version(trainer) == active, "the previous version was loaded again"

    monkeypatch.undo()
    change(trainer)
    trainer.vllm_generation.sync_weights()
    assert samples_policy(trainer)
    assert version(trainer) > active
    change(trainer)
    assert samples_policy(trainer)


@pytest.mark.parametrize("fault", [damaged_slot, contradiction])
def test_name_of_a_failed_version_is_never_used_again(
    fault: Callable[..., type[Exception]], trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    load = AdapterSlots.load

    def noted(self: AdapterSlots, name: str, *args: Any) -> Any:
        names.append(name)
        return load(self, name, *args)

    for _ in range(2):
        change(trainer)
        with monkeypatch.context() as patch:
            error = fault(trainer, patch)
            patch.setattr(AdapterSlots, "load", noted)
            with pytest.raises(error):
                trainer.vllm_generation.sync_weights()
    monkeypatch.setattr(AdapterSlots, "load", noted)
    trainer.vllm_generation.sync_weights()
    assert len(set(names)) == len(names) == 3


# Others in the engine


@pytest.fixture
def load_another(trainer: Any, tmp_path: Path) -> Callable[..., None]:
    """Has vLLM load an adapter of the base model that is not the policy."""
    from vllm.lora.request import LoRARequest

    trainer.model.save_pretrained(tmp_path / "other")

    def load(adapter_id: int, **fields: Any) -> None:
        request = LoRARequest(f"other-{adapter_id}", adapter_id, str(tmp_path / "other"), **fields)
        trainer.vllm_generation.llm.llm_engine.add_lora(request)

    return load


def evicted(trainer: Any, load_another: Callable[..., None]) -> None:
    load_another(7)
    load_another(8)


def overwritten(trainer: Any, load_another: Callable[..., None]) -> None:
    load_another(trainer.vllm_generation.active.adapter_id, load_inplace=True)


def removed(trainer: Any, load_another: Callable[..., None]) -> None:
    trainer.vllm_generation.llm.llm_engine.remove_lora(trainer.vllm_generation.active.adapter_id)


@pytest.mark.parametrize("lose", [evicted, overwritten, removed])
def test_lost_slot_is_noticed_and_the_next_sync_heals_it(
    lose: Callable[..., None], trainer: Any, load_another: Callable[..., None]
) -> None:
    generation = trainer.vllm_generation
    lose(trainer, load_another)
    for ask in (lambda: answered(generation.llm, ASKED), lambda: sample(generation, ASKED)):
        with pytest.raises(VerificationError, match=r"replaced the adapter in the slot.*sync_weights\(\)"):
            ask()
    generation.sync_weights()
    assert samples_policy(trainer)
    for _ in range(3):  # each slot once more
        change(trainer)
        assert samples_policy(trainer)


def test_idle_slot_that_is_lost_is_loaded_again(trainer: Any, load_another: Callable[..., None]) -> None:
    assert samples_policy(trainer)  # so that vLLM takes the other slot, which was used earlier
    load_another(7)
    assert samples_policy(trainer)
    for _ in range(3):
        change(trainer)
        assert samples_policy(trainer)


# Layers that cannot be written to


@pytest.fixture
def unlearned(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The trainer as if no adapter had been loaded yet."""
    monkeypatch.setattr(trainer.vllm_generation, "holder", AdapterSlots(trainer.vllm_generation.llm))
    return trainer


def some_layer(trainer: Any) -> Any:
    modules = engine.adapter_manager(trainer.vllm_generation.llm).modules
    return next(layer for name, layer in modules.items() if name.endswith("o_proj"))


def raises(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    def fail(*args: Any) -> None:
        raise AttributeError("no such layer")

    monkeypatch.setattr(AdapterSlots, "set_layers", fail)
    return "no such layer"


def writes_something_else(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A layer copies one value to another place than vLLM does when it loads a file."""
    layer, set_layers = some_layer(trainer), AdapterSlots.set_layers

    def misplaced(self: AdapterSlots, manager: Any, slot: int, sources: Any) -> None:
        set_layers(self, manager, slot, sources)
        layer.lora_b_stacked[0][slot, 0, 0, :1].copy_(sources.flat[:1])

    monkeypatch.setattr(AdapterSlots, "set_layers", misplaced)
    return "other values"


def takes_it_by_other_means(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """The layer reads a matrix that it has made of what it was given, so no copy out of the memory is seen."""
    layer = some_layer(trainer)
    set_lora = layer.set_lora
    monkeypatch.setattr(layer, "set_lora", lambda slot, lora_a, lora_b: set_lora(slot, lora_a, lora_b + 0))
    return "other values"


@pytest.mark.parametrize("reason", [raises, writes_something_else, takes_it_by_other_means])
def test_adapter_that_cannot_be_written_into_slots_is_loaded_from_files_and_served_exactly(
    reason: Callable[..., str], unlearned: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    words = reason(unlearned, monkeypatch)
    for _ in range(4):
        change(unlearned)
        assert samples_policy(unlearned)
    [warning] = [record for record in caplog.records if "from a file" in record.message]
    assert words in warning.message


def test_adapter_on_a_layer_that_vllm_ignores_is_refused(unlearned: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The start warned of slow loads only, and in a model of eight layers the trial adapter did not show it."""
    layers = engine.adapter_manager(unlearned.vllm_generation.llm).modules
    monkeypatch.delitem(layers, next(name for name in layers if name.endswith("o_proj")))
    active = version(unlearned)
    with pytest.raises(AdapterRejectedError, match=r"no layer for the adapter on model\.layers\.\*\.self_attn\.o_proj"):
        unlearned.vllm_generation.sync_weights()
    assert version(unlearned) == active


def test_adapter_is_written_into_slots_without_files_once_each_is_known(
    trainer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        change(trainer)
        trainer.vllm_generation.sync_weights()
    monkeypatch.setattr(AdapterSlots, "load_file", lambda *_: pytest.fail("a file was written"))
    for _ in range(3):
        change(trainer)
        assert samples_policy(trainer)


def test_adapter_that_moves_in_memory_is_served_exactly(trainer: Any) -> None:
    for _ in range(3):
        trainer.vllm_generation.reader.release()  # the next version is exported into other memory
        change(trainer)
        assert samples_policy(trainer)
        change(trainer)
        assert samples_policy(trainer)


def test_versions_differ_from_one_another(trainer: Any) -> None:
    """Shows that the tests above could fail: another version differs from the active one."""
    rows = answered(trainer.vllm_generation.llm, ASKED)
    change(trainer)
    assert distance(trainer.model, rows).mean() > OTHER_POLICY
