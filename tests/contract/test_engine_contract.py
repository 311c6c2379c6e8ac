"""Contract tier: one suite for the Engine protocol, run against fakes of every version and against real servers.

`served` is every server there is, `fake` a fake SGLang of each version, `few` of the oldest, the middle and the newest,
and `serve` starts a fake as a test needs it.
"""

import math
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.adapters import with_tensors

from contract.served import (
    MAX_LORA_RANK,
    OTHER_PROMPT,
    PROMPT,
    Served,
    as_tensors,
    engine_at,
    sampling,
    soon,
)
from trl_lora_sync.engines.base import TIMEOUTS, Completion, PromptGroup
from trl_lora_sync.errors import (
    AdapterLostError,
    AdapterNotVisibleError,
    AdapterRejectedError,
    GenerationError,
    LoRASyncError,
    ServerAuthError,
    ServerError,
    ServerSetupError,
    ServerUnreachableError,
)
from trl_lora_sync.testing import MODULES, VERSIONS

Serve = Callable[..., Served]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests to a server that is down are given up soon, long before their deadline."""
    monkeypatch.setitem(vars(TIMEOUTS), "retry_s", 0.2)


def gap(reported: list[float], expected: list[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(reported, expected, strict=True)) / len(expected)


def sampled_logprobs(completion: Completion) -> list[float]:
    assert completion.logprobs is not None
    assert completion.logprob_token_ids is not None
    found = []
    for token, values, ids in zip(completion.token_ids, completion.logprobs, completion.logprob_token_ids, strict=True):
        value = values[ids.index(token)]
        assert value is not None
        found.append(value)
    return found


def assert_policy(served: Served, completion: Completion, adapter: Any, temperature: float = 1.0) -> None:
    """The reported log-probabilities match `adapter`, or the base for None."""
    expected = served.reference.logprobs(adapter, completion.prompt_ids, completion.token_ids, temperature)
    assert gap(sampled_logprobs(completion), expected) < served.reference.tolerance


# Connecting


def test_connect_reports_engine_version_and_base(served: Served) -> None:
    found = served.engine.capabilities
    assert found.engine in ("sglang", "vllm")
    assert found.version[0].isdigit()
    assert found.base_model
    assert found.base_root
    assert found.logprobs_mode == "processed_logprobs"
    if served.fake:
        assert (found.engine, found.version) == ("sglang", served.fake.args.version)
        assert found.max_lora_rank == MAX_LORA_RANK
        assert found.base_root == served.fake.args.model_path


def test_connect_reports_how_long_a_prompt_may_be(served: Served) -> None:
    longest = served.engine.capabilities.max_model_len
    assert longest is not None
    assert longest >= 512


def test_connect_notices_logprobs_that_ignore_the_temperature(serve: Serve) -> None:
    assert serve(return_original_logprob=True).engine.capabilities.logprobs_mode == "raw_logprobs"


@pytest.mark.parametrize(
    ("args", "flag"),
    [
        ({"enable_lora": False}, "without LoRA support.*`trl-lora-sync serve sglang"),
        ({"dp_size": 2}, "--dp-size"),
        ({"attn_dp_size": 2}, "--attn-dp-size 2.*pinned.*`trl-lora-sync serve sglang"),
        ({"tokenizer_worker_num": 2}, "--tokenizer-worker-num"),
        ({"version": "0.5.10"}, "0.5.11"),
        ({"version": "0.5.19", "hicache_storage_backend": "file"}, "--hicache-storage-backend.*upgrade it"),
        ({"version": "0.5.20", "enable_lmcache": True}, "--enable-lmcache.*upgrade it"),
        ({"preferred_sampling_params": {"min_new_tokens": 5, "top_k": 20}}, "which sets min_new_tokens:"),
        (
            {"speculative_algorithm": "NGRAM", "speculative_accept_threshold_acc": 0.8},
            "--speculative-accept-threshold-single or -acc below 1",
        ),
    ],
)
def test_connect_refuses_a_server_that_cannot_work_and_names_what_to_change(
    serve: Serve, args: dict[str, Any], flag: str
) -> None:
    served = serve(connect=False, **args)
    with pytest.raises(ServerSetupError, match=flag):
        served.engine.connect(soon())


@pytest.mark.usefixtures("impatient")
def test_connect_to_nobody_is_unreachable(serve: Serve) -> None:
    served = serve(connect=False)
    assert served.fake is not None
    served.fake.stop()
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1"):
        served.engine.connect(soon())


def test_the_vocabulary_is_found_without_harming_the_server(served: Served) -> None:
    last = served.reference.vocab - 1
    assert served.engine.has_token(last, soon())
    assert not served.engine.has_token(last + 1, soon())
    assert served.sample(served.base)


# Keys


@pytest.mark.parametrize("version", ["0.5.15", "0.5.21", "0.5.22", "0.5.23"])
@pytest.mark.parametrize("keys", [("api", None), (None, "admin"), ("api", "admin")])
def test_right_keys_open_every_route(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str, keys: tuple[str | None, str | None]
) -> None:
    api_key, admin_key = keys
    for name, key in (("SGLANG_API_KEY", api_key), ("SGLANG_ADMIN_API_KEY", admin_key)):
        if key:
            monkeypatch.setenv(name, key)
    served = serve(version, api_key=api_key, admin_api_key=admin_key)
    stored, adapter = served.load(1)
    sent = as_tensors(served.write(adapter), adapter)
    served.engine.load(sent, soon())
    assert served.engine.unload(sent.name, soon())
    assert_policy(served, served.sample(stored.name)[0], adapter)


@pytest.mark.parametrize("key", [None, "wrong"])
def test_a_wrong_key_names_the_variable(few: Served, monkeypatch: pytest.MonkeyPatch, key: str | None) -> None:
    assert few.fake is not None
    few.fake.args = replace(few.fake.args, api_key="right")
    if key:
        monkeypatch.setenv("SGLANG_API_KEY", key)
    with pytest.raises(ServerAuthError, match="SGLANG_API_KEY") as caught:
        few.engine.connect(soon())
    assert "right" not in str(caught.value)


def test_a_missing_admin_key_names_the_variable(few: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert few.fake is not None
    few.fake.args = replace(few.fake.args, admin_api_key="secret")
    stored = few.write(few.reference.adapter(1))
    with pytest.raises(ServerAuthError, match="SGLANG_ADMIN_API_KEY"):
        few.engine.load(stored, soon())


# Loading


def test_served_logprobs_are_the_adapters_and_not_the_bases(served: Served) -> None:
    stored, adapter = served.load(1)
    # Many tokens, as single ones may be about as probable under both policies.
    completion = served.sample(stored.name, max_tokens=16, extra={"ignore_eos": True})[0]
    assert_policy(served, completion, adapter)
    base = served.reference.logprobs(None, completion.prompt_ids, completion.token_ids)
    assert gap(sampled_logprobs(completion), base) > 3 * served.reference.tolerance
    assert_policy(served, served.sample(served.base)[0], None)


def test_versions_are_served_side_by_side(served: Served) -> None:
    loaded = [served.load(seed) for seed in (1, 2)]
    for stored, adapter in loaded:
        assert_policy(served, served.sample(stored.name)[0], adapter)


def test_score_is_the_policys_own_opinion_of_a_prompt(served: Served) -> None:
    stored, adapter = served.load(1)
    for model, policy in ((stored.name, adapter), (served.base, None)):
        expected = served.reference.logprobs(policy, PROMPT[:1], PROMPT[1:])
        assert gap(served.engine.score(model, PROMPT, soon()), expected) < served.reference.tolerance


def test_a_load_tells_all_that_is_loaded_then(served: Served) -> None:
    first, _ = served.load(1)
    second = served.write(served.reference.adapter(2))

    told = served.engine.load(second, soon())

    assert told == served.engine.loaded(soon())
    assert {first.name, second.name} <= told.keys()


def test_loading_the_same_version_twice_succeeds(served: Served) -> None:
    stored, adapter = served.load(1)
    served.engine.load(stored, soon())
    assert served.engine.loaded(soon())[stored.name] == stored.server_path
    assert_policy(served, served.sample(stored.name)[0], adapter)


def test_another_path_under_a_known_name_is_refused(served: Served) -> None:
    stored, adapter = served.load(1)
    other = replace(served.write(served.reference.adapter(2)), name=stored.name)
    with pytest.raises(AdapterRejectedError, match=stored.name):
        served.engine.load(other, soon())
    assert_policy(served, served.sample(stored.name)[0], adapter)


def test_a_missing_directory_is_refused_with_its_path(served: Served) -> None:
    stored = served.write(served.reference.adapter(1))
    assert stored.path is not None
    shutil.rmtree(stored.path)
    with pytest.raises(AdapterNotVisibleError, match=str(stored.server_path)):
        served.engine.load(stored, soon())
    assert stored.name not in served.engine.loaded(soon())


def test_a_damaged_adapter_is_refused_and_the_server_lives(served: Served) -> None:
    stored = served.write(served.reference.adapter(1))
    assert stored.path is not None
    file = stored.path / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(AdapterRejectedError, match=stored.name):
        served.engine.load(stored, soon())
    assert served.sample(served.base)


def test_a_rank_that_is_too_large_names_the_flag(served: Served) -> None:
    if served.engine.capabilities.is_fused:
        pytest.skip("this server takes any rank")
    limit = served.engine.capabilities.max_lora_rank or MAX_LORA_RANK
    stored = served.write(served.reference.adapter(1, rank=2 * limit))
    with pytest.raises(ServerSetupError, match=f"`trl-lora-sync serve .* --lora-rank {2 * limit}"):
        served.engine.load(stored, soon())
    assert stored.name not in served.engine.loaded(soon())


def test_a_module_that_is_not_served_names_the_flag(serve: Serve) -> None:
    served = serve(lora_target_modules=("q_proj", "v_proj"))
    stored = served.write(served.reference.adapter(1))
    with pytest.raises(ServerSetupError, match="--lora-target-modules"):
        served.engine.load(stored, soon())


@pytest.mark.parametrize("flags", [("all",), ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), MODULES])
def test_every_way_to_name_the_served_modules_is_understood(serve: Serve, flags: tuple[str, ...]) -> None:
    served = serve(lora_target_modules=flags)
    stored, adapter = served.load(1)
    assert_policy(served, served.sample(stored.name)[0], adapter)


def test_a_part_of_the_modules_is_served_exactly(served: Served) -> None:
    adapter = served.reference.adapter(1, modules=("q_proj", "k_proj", "v_proj", "down_proj"))
    stored = served.write(adapter)
    served.engine.load(stored, soon())
    assert_policy(served, served.sample(stored.name)[0], adapter)


def test_tensors_and_disk_give_the_same_logprobs(served: Served) -> None:
    if not served.engine.capabilities.supports_tensor_load:
        pytest.skip("this server takes no tensors")
    on_disk, adapter = served.load(1)
    sent = as_tensors(served.write(adapter), adapter)
    served.engine.load(sent, soon())
    served.engine.load(sent, soon())
    for stored in (on_disk, sent):
        assert_policy(served, served.sample(stored.name)[0], adapter)
    greedy = [served.sample(stored.name, temperature=0.0)[0] for stored in (on_disk, sent)]
    assert greedy[0].token_ids == greedy[1].token_ids
    assert gap(sampled_logprobs(greedy[0]), sampled_logprobs(greedy[1])) < 1e-3


@pytest.mark.parametrize("version", VERSIONS)
def test_every_tensor_parallel_rank_gets_its_tensors(serve: Serve, version: str) -> None:
    served = serve(version, tp_size=4)
    adapter = served.reference.adapter(1)
    sent = as_tensors(served.write(adapter), adapter)
    served.engine.load(sent, soon())
    assert_policy(served, served.sample(sent.name)[0], adapter)


def test_a_load_whose_answer_is_lost_succeeds(few: Served) -> None:
    assert few.fake is not None
    few.fake.drop["/load_lora_adapter"] = 1
    stored, adapter = few.load(1)
    assert len(few.fake.bodies("/load_lora_adapter")) == 2
    assert few.fake.host_adapters == [stored.name]
    assert_policy(few, few.sample(stored.name)[0], adapter)


@pytest.mark.usefixtures("impatient")
def test_an_adapter_that_kills_the_server_is_reported_at_its_warm_up(few: Served) -> None:
    assert few.fake is not None
    adapter = few.reference.adapter(1)
    short = {name: value[:-1] if "o_proj.lora_B" in name else value for name, value in adapter.tensors.items()}
    stored = few.write(with_tensors(adapter, short))
    few.engine.load(stored, soon())
    with pytest.raises(AdapterRejectedError, match=stored.name):
        few.engine.warm_up(stored, soon())
    assert "does not match weight shape" in (few.fake.death or "")


# Sampling


@pytest.mark.parametrize("logprobs", [None, 0, 3])
def test_logprobs_have_trls_shape(served: Served, logprobs: int | None) -> None:
    stored, adapter = served.load(1)
    completion = served.sample(stored.name, logprobs=logprobs)[0]
    if logprobs is None:
        assert completion.logprobs is None
        assert completion.logprob_token_ids is None
        return
    assert completion.logprobs is not None
    assert completion.logprob_token_ids is not None
    assert len(completion.logprobs) == len(completion.logprob_token_ids) == len(completion.token_ids)
    for token, values, ids in zip(completion.token_ids, completion.logprobs, completion.logprob_token_ids, strict=True):
        assert token in ids
        assert len(values) == len(ids) == len(set(ids))
        assert max(1, logprobs) <= len(values) <= logprobs + 1
        numbers = [value for value in values if value is not None]
        assert numbers == sorted(numbers, reverse=True)
        assert all(type(value) is float for value in numbers)
    assert_policy(served, completion, adapter)


def test_groups_come_back_in_order_and_samples_differ(served: Served) -> None:
    stored, adapter = served.load(1)
    groups = [PromptGroup(prompt=PROMPT, count=4), PromptGroup(prompt=OTHER_PROMPT, count=2)]
    groups.append(PromptGroup(prompt=PROMPT[:2], count=1))
    found = served.engine.generate(stored.name, groups, sampling(), soon())
    assert [len(group) for group in found] == [4, 2, 1]
    for group, completions in zip(groups, found, strict=True):
        for completion in completions:
            assert completion.prompt_ids == group.prompt
            assert_policy(served, completion, adapter)
    assert len({tuple(completion.token_ids) for completion in found[0]}) > 1


def test_many_groups_are_all_answered(served: Served) -> None:
    groups = [PromptGroup(prompt=[1 + index, 2, 3], count=2) for index in range(70)]
    found = served.engine.generate(served.base, groups, sampling(max_tokens=1), soon())
    for group, completions in zip(groups, found, strict=True):
        assert [completion.prompt_ids for completion in completions] == [group.prompt] * 2


def test_samples_differ_on_a_server_that_draws_deterministically(serve: Serve) -> None:
    """SGLang gives every request without a seed the seed 42 then, so a group would be one completion, n times."""
    torch.manual_seed(0)  # two of four completions are equal for one seed in 750: both end at once
    served = serve(enable_deterministic_inference=True)
    completions = served.sample(served.base, count=4)
    assert len({tuple(completion.token_ids) for completion in completions}) == 4


def test_a_fixed_seed_repeats_a_group_and_not_its_samples(serve: Serve) -> None:
    served = serve(enable_deterministic_inference=True)
    first, second = (served.sample(served.base, count=3, extra={"sampling_seed": 7}) for _ in range(2))
    assert [c.token_ids for c in first] == [c.token_ids for c in second]
    assert len({tuple(completion.token_ids) for completion in first}) == 3


def test_greedy_sampling_repeats_itself(served: Served) -> None:
    first, second = (served.sample(served.base, temperature=0.0)[0] for _ in range(2))
    assert first.token_ids == second.token_ids


def test_logprobs_are_scaled_by_the_temperature(served: Served) -> None:
    stored, adapter = served.load(1)
    for temperature in (0.7, 1.0, 2.0):
        completion = served.sample(stored.name, temperature=temperature)[0]
        assert_policy(served, completion, adapter, temperature)
    # Measured on the tiny model: 0.23 on average, with a spread of 0.18 over single tokens.
    hot = served.sample(stored.name, temperature=2.0, max_tokens=64, extra={"ignore_eos": True})[0]
    plain = served.reference.logprobs(adapter, hot.prompt_ids, hot.token_ids)
    assert gap(sampled_logprobs(hot), plain) > 2 * served.reference.tolerance


def test_max_tokens_are_kept(served: Served) -> None:
    assert len(served.sample(served.base, max_tokens=3, extra={"ignore_eos": True})[0].token_ids) == 3


def test_stop_tokens_are_part_of_a_completion(served: Served) -> None:
    """Without `ignore_eos`, with which SGLang ignores these tokens as well."""
    greedy = served.sample(served.base, temperature=0.0, max_tokens=4)[0]
    stop = greedy.token_ids[:3][-1]
    expected = greedy.token_ids[: greedy.token_ids.index(stop) + 1]
    stopped = served.sample(served.base, temperature=0.0, max_tokens=4, extra={"stop_token_ids": [stop]})[0]
    assert stopped.token_ids == expected
    assert len(sampled_logprobs(stopped)) == len(expected)


def test_generation_kwargs_win_over_the_trainers_fields(served: Served) -> None:
    greedy = served.sample(served.base, temperature=0.0)[0]
    assert served.sample(served.base, temperature=1.0, extra={"temperature": 0.0})[0].token_ids == greedy.token_ids


@pytest.mark.parametrize("logprobs", [0, 3])
def test_a_regular_expression_is_obeyed(served: Served, logprobs: int) -> None:
    """With fewer allowed tokens than requested alternatives, the rest is minus infinity, which JSON lacks."""
    completion = served.sample(served.base, regex="[0-9]{3}", max_tokens=6, logprobs=logprobs)[0]
    if served.fake:
        assert served.fake.args.text_of(completion.token_ids).isdigit()
        assert len(completion.token_ids) == 4  # with the end of sequence
    else:
        assert len(completion.token_ids) in (3, 4)
    assert all(math.isfinite(value) for value in sampled_logprobs(completion))


@pytest.mark.parametrize("version", VERSIONS)
def test_every_sampling_field_is_explicit(serve: Serve, version: str) -> None:
    served = serve(version)
    assert served.fake is not None
    served.fake.requests.clear()
    served.sample(served.base, temperature=0.9, top_p=0.8, top_k=5, min_p=0.1, repetition_penalty=1.1, max_tokens=3)
    (body,) = served.fake.bodies("/generate")
    sent = body["sampling_params"]
    expected = {
        "temperature": 0.9, "top_p": 0.8, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "max_new_tokens": 3,
        "n": 1, "skip_special_tokens": False, "no_stop_trim": True,
    }  # fmt: skip
    for params in sent if isinstance(sent, list) else [sent]:
        assert expected.items() <= params.items()
    served.sample(served.base, top_k=0)
    sent = served.fake.bodies("/generate")[-1]["sampling_params"]
    assert (sent[0] if isinstance(sent, list) else sent)["top_k"] == -1


def test_truncation_restricts_what_is_drawn(served: Served) -> None:
    greedy = served.sample(served.base, temperature=0.0)[0]
    for fields in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert served.sample(served.base, **fields)[0].token_ids == greedy.token_ids


def test_an_unknown_adapter_is_lost(served: Served) -> None:
    with pytest.raises(AdapterLostError, match="never-loaded"):
        served.sample("never-loaded")


def test_an_unloaded_adapter_whose_files_are_gone_is_lost(served: Served) -> None:
    stored, _ = served.load(1)
    assert served.engine.unload(stored.name, soon())
    served.store.delete(stored)
    with pytest.raises(AdapterLostError, match=stored.name):
        served.sample(stored.name)


@pytest.mark.parametrize("fields", [{"extra": {"min_tokens": 3}}, {"top_p": 0.0}, {"extra": {"min_new_tokens": 9}}])
def test_a_refused_sampling_field_leaves_no_reference_behind(fake: Served, fields: dict[str, Any]) -> None:
    """Up to SGLang 0.5.21 the refusal came after the adapter was taken hold of, and no unload ever ended."""
    stored, _ = fake.load(1)
    with pytest.raises(GenerationError):
        fake.sample(stored.name, max_tokens=4, **fields)
    assert fake.fake is not None
    assert fake.fake.in_flight[stored.name] == 0
    assert fake.engine.unload(stored.name, soon())


def test_sampling_fields_are_judged_on_the_base_once(serve: Serve) -> None:
    served = serve("0.5.15")
    assert served.fake is not None
    stored, _ = served.load(1)
    served.fake.requests.clear()
    for _ in range(3):
        served.sample(stored.name, extra={"seed": 3})
    assert [body["lora_path"] for body in served.fake.bodies("/generate")] == [None, *[stored.name] * 3]


def test_a_prompt_that_is_too_long_is_a_generation_error(served: Served) -> None:
    longest = served.engine.capabilities.max_model_len or 512
    with pytest.raises(GenerationError):
        served.sample(served.base, prompt=[1] * (longest + 1))


def test_a_prompt_that_is_too_long_does_not_block_the_adapters_unload(fake: Served) -> None:
    """Up to 0.5.21 a request that is refused after it acquired its adapter keeps the reference for ever."""
    stored, _ = fake.load(1)
    with pytest.raises(GenerationError):
        fake.sample(stored.name, prompt=[1] * 600)
    assert fake.engine.unload(stored.name, soon())


def _no_logprobs(output: dict[str, Any]) -> None:
    del output["meta_info"]["output_token_logprobs"]


def _nan_happened(output: dict[str, Any]) -> None:
    # SGLang puts the end of sequence in place of a token outside of the vocabulary (managers/schedule_batch.py
    # `_check_vocab_boundary_finish`), and calls it a stop.
    output["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}


@pytest.mark.parametrize("damage", [_no_logprobs, _nan_happened])
def test_answers_that_cannot_be_trained_on_are_errors(serve: Serve, damage: Callable[[dict[str, Any]], None]) -> None:
    served = serve()
    assert served.fake is not None
    stored, _ = served.load(1)
    served.fake.edit_output = damage
    with pytest.raises(GenerationError):
        served.sample(stored.name)


@pytest.mark.parametrize("status", [None, 400, 500])
def test_an_abort_is_an_error(few: Served, status: int | None) -> None:
    assert few.fake is not None
    few.fake.abort_with = [status]
    with pytest.raises(GenerationError, match="Aborted"):
        few.sample(few.base)


@pytest.mark.parametrize("queued", [False, True])
def test_samples_that_another_client_aborts_are_errors(few: Served, queued: bool) -> None:
    assert few.fake is not None
    with ThreadPoolExecutor() as pool, few.fake.hold(queued=queued):
        sampled = pool.submit(few.sample, few.base, 2)
        few.fake.wait_until(lambda: few.fake.running == 2)  # type: ignore[union-attr]
        few.fake.abort_all()
        with pytest.raises(GenerationError, match="cut off"):
            sampled.result(10)


def test_adapters_are_chosen_by_name_on_the_token_route_only(fake: Served) -> None:
    """The OpenAI routes serve the base, with HTTP 200, for an adapter that is named without a colon."""
    assert fake.fake is not None
    stored, _ = fake.load(1)
    fake.sample(stored.name)  # the first time, sampling fields are judged on the base
    fake.fake.requests.clear()
    fake.sample(stored.name, count=3)
    assert {request.path for request in fake.fake.requests} == {"/generate"}
    assert {body["lora_path"] for body in fake.fake.bodies("/generate")} == {stored.name}


# Unloading


def test_unloading_a_missing_name_counts_as_done(served: Served) -> None:
    assert served.engine.unload("never-loaded", soon())


def test_an_unloaded_adapter_is_no_longer_listed(served: Served) -> None:
    stored, _ = served.load(1)
    assert served.engine.unload(stored.name, soon())
    assert stored.name not in served.engine.loaded(soon())
    assert served.engine.unload(stored.name, soon())


def test_retiring_keeps_the_number_of_adapters_flat(served: Served) -> None:
    before = len(served.engine.loaded(soon()))
    kept: list[str] = []
    for seed in range(6):
        stored, _ = served.load(seed)
        served.sample(stored.name, count=3, max_tokens=1)
        kept.append(stored.name)
        if len(kept) > 2:
            assert served.engine.unload(kept.pop(0), soon())
        assert len(served.engine.loaded(soon())) - before <= 2
    if served.fake:
        assert sorted(served.fake.host_adapters) == sorted(kept)
        assert served.fake.peak_host_adapters <= 3
        assert all(count == 0 for count in served.fake.in_flight.values())


def test_a_retirement_is_not_held_up_by_groups_of_samples(fake: Served) -> None:
    """n > 1 leaves the reference counter below zero up to 0.5.21, and no unload ever ends."""
    assert fake.fake is not None
    stored, _ = fake.load(1)
    fake.sample(stored.name, count=8, max_tokens=1)
    assert fake.fake.in_flight[stored.name] == 0
    assert fake.engine.unload(stored.name, soon())


def test_an_unload_that_hangs_ends_with_its_deadline_and_holds_nobody_up(few: Served) -> None:
    assert few.fake is not None
    stored, _ = few.load(1)
    few.sample(stored.name)  # the first time, sampling fields are judged on the base, which is held as well
    with ThreadPoolExecutor() as pool, few.fake.hold():
        held = pool.submit(few.sample, stored.name)
        few.fake.wait_until(lambda: few.fake.running == 1)  # type: ignore[union-attr]
        started = time.monotonic()
        unload = _begun_unload(few, stored.name, pool)
        assert stored.name not in few.engine.loaded(soon())
        assert unload.result(30) is False
        assert time.monotonic() - started < 10
        few.fake.let_go()
        assert held.result(10)


def test_sampling_goes_on_while_an_unload_hangs(few: Served) -> None:
    assert few.fake is not None
    stored, _ = few.load(1)
    newer, adapter = few.load(2)
    _leak(few, stored.name)
    with ThreadPoolExecutor() as pool:
        unload = _begun_unload(few, stored.name, pool)
        assert_policy(few, few.sample(newer.name)[0], adapter)
        assert unload.result(30) is False


def test_a_load_behind_an_unload_that_hangs_says_what_to_do(few: Served) -> None:
    stored, _ = few.load(1)
    _leak(few, stored.name)
    with ThreadPoolExecutor() as pool:
        assert _begun_unload(few, stored.name, pool).result(30) is False
    newer = few.write(few.reference.adapter(2))
    started = time.monotonic()
    with pytest.raises(LoRASyncError, match=r"(?i)restart"):
        few.engine.load(newer, soon(0.5))
    assert time.monotonic() - started < 10
    assert few.engine.unload(newer.name, soon(0.2)) is False


def test_a_slow_unload_that_ends_after_all_lets_later_versions_load(few: Served) -> None:
    """Long rollouts of another client hold an adapter for a while; this must not end a training run."""
    assert few.fake is not None
    stored, _ = few.load(1)
    few.sample(stored.name)  # the first time, sampling fields are judged on the base, which is held as well
    with ThreadPoolExecutor() as pool:
        with few.fake.hold():
            held = pool.submit(few.sample, stored.name)
            few.fake.wait_until(lambda: few.fake.running == 1)  # type: ignore[union-attr]
            assert _begun_unload(few, stored.name, pool).result(30) is False
        held.result(10)
    few.fake.wait_until(lambda: stored.name not in few.fake.host_adapters)  # type: ignore[union-attr]
    newer, adapter = few.load(2)
    assert_policy(few, few.sample(newer.name)[0], adapter)


def _begun_unload(served: Served, adapter_name: str, pool: ThreadPoolExecutor) -> "Future[bool]":
    """An unload with a short deadline, which the server has taken up and which something else there holds up."""
    unload = pool.submit(served.engine.unload, adapter_name, soon(1))
    served.fake.wait_until(lambda: adapter_name not in served.fake.registered)  # type: ignore[union-attr]
    return unload


def _leak(fake: Served, adapter_name: str) -> None:
    """Leave a reference behind, as the bugs of several versions do."""
    assert fake.fake is not None
    fake.fake.add_references(adapter_name, -1)


def test_unloading_never_raises(few: Served) -> None:
    assert few.fake is not None
    few.fake.canned["/unload_lora_adapter"] = [(500, "Internal Server Error"), (401, {"error": "Unauthorized"})]
    assert few.engine.unload("x", soon()) is False
    assert few.engine.unload("x", soon()) is False
    few.fake.stop()
    assert few.engine.unload("x", soon()) is False


def test_an_unload_without_any_time_left_is_not_taken_for_a_hang(few: Served) -> None:
    stored, _ = few.load(1)
    spent = soon(0.0)
    assert few.engine.unload(stored.name, spent) is False
    assert few.engine.unload(stored.name, soon())
    few.load(2)


# Restarts


def test_a_restarted_server_has_lost_its_adapters(few: Served) -> None:
    assert few.fake is not None
    stored, adapter = few.load(1)
    few.fake.restart()
    with pytest.raises(AdapterLostError, match=stored.name):
        few.sample(stored.name)
    few.engine.load(stored, soon())
    assert_policy(few, few.sample(stored.name)[0], adapter)


@pytest.mark.usefixtures("impatient")
def test_a_stopped_server_is_unreachable(few: Served) -> None:
    assert few.fake is not None
    stored, _ = few.load(1)
    few.fake.stop()
    group = [PromptGroup(prompt=PROMPT, count=1)]
    with pytest.raises(ServerUnreachableError, match=r"127\.0\.0\.1"):
        few.engine.generate(stored.name, group, sampling(), soon())


# Pausing and memory


@pytest.mark.parametrize("mode", ["drain", "abort"])
def test_while_paused_adapters_load_requests_wait_and_nothing_is_unloaded(few: Served, mode: str) -> None:
    assert few.fake is not None
    stored, _ = few.load(1)
    few.engine.pause(mode, soon())
    try:
        assert few.engine.unload(stored.name, soon()) is False
        newer = few.write(few.reference.adapter(2))
        few.engine.load(newer, soon())
        with ThreadPoolExecutor() as pool:
            before = len(few.fake.bodies("/generate"))
            waiting = pool.submit(few.sample, newer.name)
            few.fake.wait_until(lambda: len(few.fake.bodies("/generate")) > before)  # type: ignore[union-attr]
            time.sleep(0.1)  # in which it would be answered
            assert not waiting.done()
            few.engine.resume(soon())
            assert waiting.result(10)
    finally:
        few.engine.resume(soon())
    assert few.fake.bodies("/unload_lora_adapter") == []
    assert few.engine.unload(stored.name, soon())


def test_draining_lets_running_requests_finish(few: Served) -> None:
    assert few.fake is not None

    def looks() -> int:
        return sum(request.path.startswith("/v1/loads") for request in few.fake.requests)  # type: ignore[union-attr]

    with ThreadPoolExecutor() as pool:
        with few.fake.hold():
            running = pool.submit(few.sample, few.base)
            few.fake.wait_until(lambda: few.fake.running == 1)  # type: ignore[union-attr]
            pausing = pool.submit(few.engine.pause, "drain", soon())
            few.fake.wait_until(lambda: looks() > 1)  # type: ignore[union-attr]
            assert not pausing.done()
        pausing.result(10)
        assert running.result(10)
    few.engine.resume(soon())
    assert few.sample(few.base)


def test_aborting_ends_running_requests(few: Served) -> None:
    assert few.fake is not None
    with ThreadPoolExecutor() as pool, few.fake.hold():
        running = pool.submit(few.sample, few.base)
        few.fake.wait_until(lambda: few.fake.running == 1)  # type: ignore[union-attr]
        few.engine.pause("abort", soon())
        with pytest.raises(GenerationError):
            running.result(10)
    few.engine.resume(soon())


def test_resuming_without_a_pause_is_harmless(few: Served) -> None:
    few.engine.resume(soon())
    assert few.sample(few.base)


@pytest.mark.parametrize("version", VERSIONS)
def test_adapters_survive_a_release_of_the_kv_cache(serve: Serve, version: str) -> None:
    served = serve(version, enable_memory_saver=True)
    stored, adapter = served.load(1)
    served.engine.release_kv_cache(soon())
    newer = served.write(served.reference.adapter(2))
    served.engine.load(newer, soon())
    if not served.engine.restore_kv_cache(soon()):
        served.engine.load(stored, soon())
    assert_policy(served, served.sample(stored.name)[0], adapter)
    assert_policy(served, served.sample(served.base)[0], None)


@pytest.mark.parametrize("version", VERSIONS)
def test_restoring_what_was_not_released_is_harmless(serve: Serve, version: str) -> None:
    """SGLang removes the tag from a set, and exits with the KeyError; a run that cleans up may well restore twice."""
    served = serve(version, enable_memory_saver=True)
    served.engine.restore_kv_cache(soon())
    served.engine.release_kv_cache(soon())
    for _ in range(2):
        served.engine.restore_kv_cache(soon())
    assert served.sample(served.base)


def test_releasing_twice_is_harmless(serve: Serve) -> None:
    served = serve(enable_memory_saver=True)
    for _ in range(2):
        served.engine.release_kv_cache(soon())
    served.engine.restore_kv_cache(soon())
    assert served.sample(served.base)


@pytest.mark.parametrize("version", VERSIONS)
def test_memory_is_not_released_under_running_requests(
    serve: Serve, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang asserts that it is idle, and exits otherwise."""
    monkeypatch.setitem(vars(TIMEOUTS), "idle_s", 0.2)
    served = serve(version, enable_memory_saver=True)
    assert served.fake is not None
    with ThreadPoolExecutor() as pool:
        with served.fake.hold():
            group = [PromptGroup(prompt=PROMPT, count=1)]
            running = pool.submit(served.engine.generate, served.base, group, sampling(), soon())
            served.fake.wait_until(lambda: served.fake.running == 1)  # type: ignore[union-attr]
            with pytest.raises(ServerError, match="did not become idle"):
                served.engine.release_kv_cache(soon())
            assert served.fake.death is None
        assert running.result(10)


# Both engines alike


def structure(found: list[list[Completion]]) -> Any:
    """Types and lengths without values."""

    def shape(value: Any) -> Any:
        if isinstance(value, list):
            return [shape(inner) for inner in value]
        return type(value).__name__

    return [
        [
            (shape(c.prompt_ids), set(map(str, map(type, c.token_ids))), len(c.token_ids) == 4)
            + ((None, None) if c.logprobs is None else (len(c.logprobs), [len(v) >= 1 for v in c.logprobs]))
            for c in group
        ]
        for group in found
    ]


@pytest.mark.vllm
@pytest.mark.parametrize("logprobs", [None, 0, 2])
def test_both_engines_give_the_same_structure(serve: Serve, vllm_at: tuple[str, str], logprobs: int | None) -> None:
    groups = [PromptGroup(prompt=PROMPT, count=2), PromptGroup(prompt=OTHER_PROMPT, count=1)]
    plain = sampling(logprobs=logprobs, max_tokens=4, extra={"ignore_eos": True})
    vllm = engine_at(vllm_at[0], "vllm")
    try:
        from_vllm = vllm.generate(vllm.capabilities.base_model, groups, plain, soon())
    finally:
        vllm.close()
    sglang = serve()
    assert structure(sglang.engine.generate(sglang.base, groups, plain, soon())) == structure(from_vllm)


def test_one_engine_serves_several_threads(served: Served) -> None:
    stored, adapter = served.load(1)
    barrier = threading.Barrier(4)

    def sample(seed: int) -> Completion:
        barrier.wait(10)
        return served.sample(stored.name, prompt=[seed + 1, *PROMPT])[0]

    with ThreadPoolExecutor(4) as pool:
        for completion in pool.map(sample, range(4)):
            assert_policy(served, completion, adapter)
