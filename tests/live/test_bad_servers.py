"""Live tier: servers that cannot be used, vanish, or answer for another policy; each a clear error in time."""

import json
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from make_model import make_model
from support.models import lora, randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.servers import Proxy, adapters_on, damage, is_scoring, nobody_listening, silent_server
from support.trainers import mean_byte, shorten, steps_of
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.errors import (
    AdapterRejectedError,
    DeadlineExceededError,
    GenerationError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
    WrongPolicyError,
)

Make = Callable[..., GRPOTrainer]
# Four servers start before the first test that needs one.
pytestmark = pytest.mark.timeout(900)
KEY = "sk-a-secret-that-must-not-show"


# What a run waits for if the setting in question does nothing: longer than a busy machine takes for all else.
PATIENT = {"vllm_server_timeout": 120.0, "lora_sync_timeout": 120.0, "lora_sync_generation_timeout": 120.0}


def no_files(folder: Path) -> bool:
    """Whether the run removed every file; its folder may be left only if others use it."""
    return not (folder / "sync").exists()


@pytest.fixture
def end_of_test() -> Iterator[threading.Event]:
    """Set at the end, for what is not to answer until then."""
    event = threading.Event()
    yield event
    event.set()


# Wrong from the start


def test_an_unreachable_server_is_reported_when_vllm_server_timeout_is_over(
    make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    with nobody_listening() as url:
        started = time.monotonic()

        with pytest.raises(ServerUnreachableError, match=f"No server answers at {url}.*Start it"):
            make_trainer(url, base_model, **PATIENT | {"vllm_server_timeout": 2.0})

        assert time.monotonic() - started < 60
    assert no_files(tmp_path)


def test_a_server_that_never_answers_is_reported_when_vllm_server_timeout_is_over(
    make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    with silent_server() as url:
        started = time.monotonic()

        with pytest.raises(DeadlineExceededError, match=f"Waiting for the server at {url} did not finish within 2 s"):
            make_trainer(url, base_model, **PATIENT | {"vllm_server_timeout": 2.0})

        assert time.monotonic() - started < 60
    assert no_files(tmp_path)


@pytest.fixture(scope="module")
def other_servers(base_model: Path) -> Iterator[dict[str, VLLMServer]]:
    """Four more real servers, started side by side, as a start takes mostly one core."""
    servers = {
        "guarded": VLLMServer(base_model, api_key=KEY, max_lora_rank=8),
        "without LoRA": VLLMServer(base_model, enable_lora=False),
        "without runtime loading": VLLMServer(base_model, runtime_updating=False),
        "disposable": VLLMServer(base_model),
    }
    try:
        for server in servers.values():
            server.launch()
        for server in servers.values():
            server.wait_until_ready()
        yield servers
    finally:
        for server in servers.values():
            server.stop()


@pytest.fixture
def guarded_server(other_servers: dict[str, VLLMServer]) -> VLLMServer:
    """Wants a key, and takes adapters of a small rank only."""
    return other_servers["guarded"]


@pytest.mark.parametrize(
    ("key", "state"),
    [
        (None, "an API key, and VLLM_API_KEY is not set"),
        ("sk-another-secret", "another API key than the one in VLLM_API_KEY"),
    ],
)
def test_a_missing_or_wrong_key_is_reported_and_never_shown(
    key: str | None,
    state: str,
    guarded_server: VLLMServer,
    make_trainer: Make,
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if key:
        monkeypatch.setenv("VLLM_API_KEY", key)
    caplog.set_level("DEBUG")

    with pytest.raises(ServerAuthError, match=f"wants {state}") as caught:
        make_trainer(guarded_server.base_url, base_model)

    shown = "".join([*traceback.format_exception(caught.value), caplog.text, *capfd.readouterr()])
    assert "secret" not in shown
    assert no_files(tmp_path)


def test_the_right_key_trains_and_is_in_no_output_no_log_and_no_checkpoint(
    guarded_server: VLLMServer,
    make_trainer: Make,
    base_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    caplog.set_level("DEBUG")

    trainer = make_trainer(guarded_server.base_url, base_model, max_steps=2, save_strategy="steps", save_steps=1)
    trainer.train()

    assert [step["lora_sync/version"] for step in steps_of(trainer)] == [1, 2]
    assert adapters_on(guarded_server.base_url, KEY) == {}
    assert KEY not in "".join([caplog.text, repr(trainer.vllm_generation.__dict__), *capfd.readouterr()])
    written = [path for path in (tmp_path / "out").rglob("*") if path.is_file()]
    assert any(path.name == "training_args.bin" for path in written)
    assert not [path for path in written if KEY.encode() in path.read_bytes()]


def test_a_server_with_too_small_a_max_lora_rank_is_told_the_one_it_needs(
    guarded_server: VLLMServer, make_trainer: Make, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", KEY)

    command = r"`trl-lora-sync serve vllm \S+ --lora-rank 12 --port \d+[^`]*`"
    with pytest.raises(ServerSetupError, match=rf"rank 12\..* Restart it with {command}\. The server answered: .*12"):
        make_trainer(guarded_server.base_url, base_model, peft_config=lora(r=12))

    assert no_files(tmp_path)
    assert adapters_on(guarded_server.base_url, KEY) == {}


def test_a_server_without_lora_is_told_to_enable_it(
    other_servers: dict[str, VLLMServer], make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerSetupError, match=r"without LoRA support\. Restart it with `trl-lora-sync serve vllm"):
        make_trainer(other_servers["without LoRA"].base_url, base_model)

    assert no_files(tmp_path)


def test_a_server_without_runtime_loading_is_told_to_allow_it(
    other_servers: dict[str, VLLMServer], make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ServerSetupError, match=r"loaded while it runs\. Restart it with `trl-lora-sync serve vllm"):
        make_trainer(other_servers["without runtime loading"].base_url, base_model)

    assert no_files(tmp_path)


@pytest.mark.parametrize(
    ("shape", "evidence"),
    [
        ({"hidden_size": 256}, "refused an adapter of the trainer's shapes"),
        # vLLM 0.31 fills what is missing with zeros and answers 200, so this one is looked for.
        ({"hidden_size": 64}, "its layers are wider than the trainer's"),
        ({"vocab_size": 300}, "its vocabulary has fewer than the trainer's 300 tokens"),
    ],
    ids=["larger", "smaller", "more_tokens"],
)
def test_a_server_with_a_base_model_of_other_shapes_is_refused_even_if_nothing_is_to_be_verified(
    shape: dict[str, int],
    evidence: str,
    make_trainer: Make,
    clean_server: VLLMServer,
    tmp_path: Path,
) -> None:
    ours = make_model(tmp_path / "ours", **shape)

    with pytest.raises(ServerSetupError, match=f"which is not the base model of the trainer.*{evidence}"):
        make_trainer(clean_server.base_url, ours, lora_sync_verify="off")

    assert no_files(tmp_path)


@pytest.mark.parametrize("difference", [{"seed": 1}, {"num_hidden_layers": 3}], ids=["other_weights", "other_depth"])
def test_another_base_model_that_takes_the_adapter_is_warned_about_if_nothing_is_to_be_verified(
    difference: dict[str, int],
    make_trainer: Make,
    clean_server: VLLMServer,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ours = make_model(tmp_path / "ours", **difference)

    make_trainer(clean_server.base_url, ours, lora_sync_verify="off")

    by_name, by_logprobs = [r.getMessage() for r in caplog.records if r.name.startswith("trl_lora_sync")]
    assert str(ours) in by_name
    assert clean_server.served_model_name in by_name
    assert "another policy" in by_name
    assert "computes other log-probabilities than the trainer's: mean |served - trained|" in by_logprobs


def test_a_run_may_start_while_somebody_else_samples(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, end_of_test: threading.Event
) -> None:
    """The start scored a prompt by `prompt_logprobs`, which ended a vLLM that was computing anything else."""
    body = {"model": clean_server.served_model_name, "prompt": token_ids(1), "max_tokens": 50, "ignore_eos": True}
    under_way = threading.Event()

    def sample_on() -> int:
        answered = 0
        with httpx.Client(base_url=clean_server.base_url, timeout=120, trust_env=False) as client:
            while not end_of_test.is_set():
                client.post("/v1/completions", json=body).raise_for_status()
                answered += 1
                under_way.set()
        return answered

    with ThreadPoolExecutor() as pool:
        others = [pool.submit(sample_on) for _ in range(3)]
        try:
            assert under_way.wait(60)
            trainer = make_trainer(clean_server.base_url, base_model, **PATIENT)
            trainer.vllm_generation.sync_weights()
            assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))
        finally:
            end_of_test.set()
        assert all(other.result() for other in others)


def test_the_same_base_model_is_not_warned_about(
    make_trainer: Make, clean_server: VLLMServer, base_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_trainer(clean_server.base_url, base_model)

    assert not [record for record in caplog.records if record.name.startswith("trl_lora_sync")]


# Wrong later


def test_a_refused_version_leaves_the_one_before_active_and_its_files_intact(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model)
    generation = trainer.vllm_generation
    randomize_adapter(trainer.model, seed=1)
    generation.sync_weights()
    before = adapters_on(proxy.target)
    files = {path: path.read_bytes() for path in tmp_path.glob("sync/*/*-v1/*")}

    def damage_second(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter" and body["lora_name"].endswith("-v2"):
            damage(body["lora_path"])
        return body

    proxy.before = damage_second
    randomize_adapter(trainer.model, seed=2)
    with pytest.raises(AdapterRejectedError, match=r"refused to load the adapter .*-v2.* The server answered: "):
        generation.sync_weights()

    assert adapters_on(proxy.target) == before
    assert {path: path.read_bytes() for path in files} == files
    left = sorted(path.name for path in (tmp_path / "sync").glob("*/*"))
    assert left == [*before, "owner.json"]
    randomize_adapter(trainer.model, seed=1)  # the version before, of which no other is published to sample from
    assert is_policy_of(trainer.model, sample(generation, [token_ids(seed) for seed in range(4)]))
    assert adapters_on(proxy.target) == before
    generation.sync_weights()
    assert [name.rpartition("-v")[2] for name in sorted(adapters_on(proxy.target))] == ["1", "3"]


def test_a_refused_version_ends_the_run_and_nothing_is_left(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    def damage_second(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter" and body["lora_name"].endswith("-v2"):
            damage(body["lora_path"])
        return body

    proxy.before = damage_second
    trainer = make_trainer(proxy.base_url, base_model)

    with pytest.raises(AdapterRejectedError):
        trainer.train()

    assert trainer.state.global_step == 1
    assert no_files(tmp_path)
    assert adapters_on(proxy.target) == {}


def test_a_load_whose_answer_was_lost_is_repeated_and_counts_once(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    lost: list[str] = []
    trainer = make_trainer(proxy.base_url, base_model)

    def lose_first_answer(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/load_lora_adapter" and not lost:
            lost.append(path)
            return 503, b"the proxy lost the answer"
        return status, answer

    proxy.after = lose_first_answer
    trainer.vllm_generation.sync_weights()

    assert len(proxy.loads()) == 2
    assert len({load["lora_name"] for load in proxy.loads()}) == 1
    assert len(adapters_on(proxy.target)) == 1


def test_an_answer_in_the_name_of_another_model_is_never_trained_on(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    rewards: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        rewards.extend(completions)
        return mean_byte(completions)

    trainer = make_trainer(proxy.base_url, base_model, reward_funcs=reward)

    def answer_as_base(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/completions":
            answer = json.dumps(json.loads(answer) | {"model": "the-base-model"}).encode()
        return status, answer

    proxy.after = answer_as_base
    with pytest.raises(WrongPolicyError, match=r"completions of 'the-base-model' instead of '.*-v1'"):
        trainer.train()

    assert rewards == []
    assert no_files(tmp_path)


def without(name: str, content: bytes) -> bytes:
    return json.dumps({key: value for key, value in json.loads(content).items() if key != name}).encode()


def test_a_gateway_that_drops_the_model_there_and_back_is_found_out(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    """Completions of the base model went into the training."""
    rewards: list[str] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        rewards.extend(completions)
        return mean_byte(completions)

    trainer = make_trainer(proxy.base_url, base_model, reward_funcs=reward)
    proxy.before = lambda path, body: {name: value for name, value in body.items() if name != "model"}
    proxy.after = lambda path, status, answer: (
        (status, without("model", answer)) if path == "/v1/completions" else (status, answer)
    )
    with pytest.raises(WrongPolicyError, match=r"name no model instead of '.*-v1'"):
        trainer.train()

    assert rewards == []
    assert no_files(tmp_path)


def test_completions_without_their_prompt_are_never_trained_on(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model)

    def forget_prompts(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        if path == "/v1/completions":
            content = json.loads(answer)
            for choice in content["choices"]:
                del choice["prompt_token_ids"]
            answer = json.dumps(content).encode()
        return status, answer

    proxy.after = forget_prompts
    with pytest.raises(GenerationError, match="without the token ids of its prompt"):
        trainer.train()


def test_a_gateway_that_limits_requests_slows_a_run_down_and_does_not_end_it(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, max_steps=1)
    asked: set[str] = set()

    def limit_first(path: str, status: int, answer: bytes) -> tuple[int, bytes]:
        first = path not in asked
        asked.add(path)
        return (429, b'{"error": "slow down"}') if first else (status, answer)

    proxy.after = limit_first
    trainer.train()
    assert {"/v1/load_lora_adapter", "/v1/completions"} <= asked


def test_a_proxy_that_quietly_asks_the_base_model_is_found_out(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """The server then names the base model in its answer."""
    trainer = make_trainer(proxy.base_url, base_model)
    proxy.before = lambda path, body: body | {"model": base_of(proxy)} if path == "/v1/completions" else body

    with pytest.raises(WrongPolicyError, match=r"instead of '.*-v1'"):
        trainer.train()


def base_of(proxy: Proxy) -> str:
    listing = next(exchange.answer for exchange in proxy.exchanges if exchange.path == "/v1/models")
    return str(json.loads(listing)["data"][0]["id"])


def test_a_server_that_stops_answering_during_a_sync_is_reported_when_lora_sync_timeout_is_over(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path, end_of_test: threading.Event
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, **PATIENT)
    shorten(trainer, sync_timeout_s=2.0)

    def hang(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter":
            end_of_test.wait(120)
            raise ConnectionAbortedError
        return body

    proxy.before = hang
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"lora_sync_timeout.* did not finish within 2 s"):
        trainer.train()

    assert time.monotonic() - started < 60
    assert no_files(tmp_path)


def test_a_server_that_stops_answering_during_generation_is_reported_in_time(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path, end_of_test: threading.Event
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, **PATIENT | {"lora_sync_generation_timeout": 2.0})

    def hang(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions" and not is_scoring(body):
            end_of_test.wait(120)
            raise ConnectionAbortedError
        return body

    proxy.before = hang
    started = time.monotonic()
    with pytest.raises(DeadlineExceededError, match=r"lora_sync_generation_timeout.* did not finish within 2 s"):
        trainer.train()

    assert time.monotonic() - started < 60
    assert no_files(tmp_path)
    assert adapters_on(proxy.target) == {}


@pytest.fixture
def disposable(other_servers: dict[str, VLLMServer]) -> VLLMServer:
    """A running server that tests may kill."""
    server = other_servers["disposable"]
    if not server.is_running():
        server.start()
    return server


def test_a_restarted_server_is_given_the_active_version_again_and_then_the_next_one(
    disposable: VLLMServer, make_trainer: Make, base_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer(disposable.base_url, base_model)
    generation = trainer.vllm_generation
    randomize_adapter(trainer.model, seed=1)
    generation.sync_weights()
    assert is_policy_of(trainer.model, sample(generation, [token_ids(1)]))

    disposable.kill()
    disposable.start()

    assert is_policy_of(trainer.model, sample(generation, [token_ids(1)]))
    assert f"{disposable.base_url} had lost" in caplog.text
    randomize_adapter(trainer.model, seed=2)
    generation.sync_weights()
    assert is_policy_of(trainer.model, sample(generation, [token_ids(1)]))


def test_a_server_killed_between_steps_ends_the_run_within_the_timeout(
    disposable: VLLMServer, make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    killed_at: list[float] = []

    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        disposable.kill()
        killed_at.append(time.monotonic())
        shorten(trainer, sync_timeout_s=8.0)
        return mean_byte(completions)

    trainer = make_trainer(disposable.base_url, base_model, reward_funcs=reward, **PATIENT)

    with pytest.raises(ServerUnreachableError, match=disposable.base_url):
        trainer.train()

    assert time.monotonic() - killed_at[0] < 60
    assert trainer.state.global_step == 1
    assert no_files(tmp_path)
