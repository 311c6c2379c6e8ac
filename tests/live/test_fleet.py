"""Live tier: two real servers as one; one of them crashes, comes back, refuses, or is another engine."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from contract.reference import FakeReference
from contract.served import sampling, soon
from support.models import peft_model, randomize_adapter
from support.policies import RATIO_SPREAD, Row, is_policy_of, sample, token_ids
from support.servers import Proxy, adapters_on, proxy_to, vllm_version
from support.settings import plain_settings
from support.trainers import METRICS, steps_of
from vllm_server import VLLMServer

import trl_lora_sync.servers.handle
from trl_lora_sync import GRPOTrainer
from trl_lora_sync.adapter.canonical import Form
from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.checks.verify import PROBE_PROMPT, TrainedBase
from trl_lora_sync.engines.base import TIMEOUTS, Deadline, PromptGroup
from trl_lora_sync.errors import AdapterNotVisibleError
from trl_lora_sync.metrics import SyncReport
from trl_lora_sync.runtime import Blocking
from trl_lora_sync.settings import SyncSettings
from trl_lora_sync.sync import AdapterSync
from trl_lora_sync.testing import FakeSGLang, Shapes

# Several servers start and restart here, which takes minutes where the cores are busy.
pytestmark = pytest.mark.timeout(900)
Make = Callable[..., GRPOTrainer]
PROMPTS = [token_ids(seed) for seed in range(8)]
# A restart takes 20 s on an idle machine.
PATIENT = {"lora_sync_timeout": 240.0, "lora_sync_generation_timeout": 240.0}


@pytest.fixture(scope="module")
def own_server(base_model: Path) -> Iterator[VLLMServer]:
    """A second server beside the shared one; tests may kill it."""
    with VLLMServer(base_model) as running:
        yield running


@pytest.fixture
def second(own_server: VLLMServer) -> VLLMServer:
    if not own_server.is_running():
        own_server.start()
    return own_server


@pytest.fixture
def proxies(clean_server: VLLMServer, second: VLLMServer) -> Iterator[list[Proxy]]:
    """In front of both servers."""
    with ExitStack() as stack:
        yield [stack.enter_context(proxy_to(server.base_url)) for server in (clean_server, second)]


def urls(*servers: VLLMServer | Proxy) -> str:
    return ",".join(server.base_url for server in servers)


def reported(trainer: GRPOTrainer) -> list[SyncReport]:
    """Collects the report of each sync from here on."""
    reports: list[SyncReport] = []
    trainer.vllm_generation.on_sync = reports.append
    return reports


def test_a_run_trains_the_policy_that_two_servers_sample_from(
    make_trainer: Make, proxies: list[Proxy], base_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = make_trainer(
        urls(*proxies), base_model, max_steps=4, per_device_train_batch_size=16, num_generations=4, **PATIENT
    )
    announced = [line for line in capsys.readouterr().out.splitlines() if line.startswith("LoRA adapter sync:")]

    trainer.train()

    assert len(announced) == 1
    assert all(f"vllm {vllm_version(proxy.base_url)} at {proxy.base_url}" in announced[0] for proxy in proxies)
    steps = steps_of(trainer)
    assert [step["lora_sync/version"] for step in steps] == [1, 2, 3, 4]
    for step in steps:
        assert step.keys() >= METRICS | {"lora_sync/load_s/0", "lora_sync/load_s/1"}
        assert step["lora_sync/servers"] == 2
        assert step["sampling/importance_sampling_ratio/mean"] == pytest.approx(1.0, abs=RATIO_SPREAD)
    asked = [
        {(body["model"], tuple(ids)) for body in proxy.generations() for ids in body["prompt"]} for proxy in proxies
    ]
    assert {model.rpartition("-v")[2] for model, _ in asked[0]} == {"1", "2", "3", "4"}
    assert {model.rpartition("-v")[2] for model, _ in asked[1]} == {"1", "2", "3", "4"}
    assert not asked[0] & asked[1], "the group of one prompt was split"
    assert [adapters_on(proxy.target) for proxy in proxies] == [{}, {}]


def test_a_version_that_one_server_does_not_get_is_on_neither(
    make_trainer: Make, proxies: list[Proxy], base_model: Path
) -> None:
    trainer = make_trainer(urls(*proxies), base_model, **PATIENT)
    generation = trainer.vllm_generation
    randomize_adapter(trainer.model, seed=1)
    generation.sync_weights()
    before = [adapters_on(proxy.target) for proxy in proxies]

    proxies[1].before = lambda path, body: (
        body | {"lora_path": "/nonexistent"} if path == "/v1/load_lora_adapter" else body
    )
    randomize_adapter(trainer.model, seed=2)
    with pytest.raises(AdapterNotVisibleError, match=f"{proxies[1].base_url} does not find the adapter"):
        generation.sync_weights()

    assert [adapters_on(proxy.target) for proxy in proxies] == before
    randomize_adapter(trainer.model, seed=1)
    assert is_policy_of(trainer.model, sample(generation, PROMPTS))


@pytest.mark.slow
def test_a_server_killed_while_it_samples_is_replaced_by_the_other_and_taken_back_once_it_is_up(
    make_trainer: Make, proxies: list[Proxy], second: VLLMServer, base_model: Path
) -> None:
    trainer = make_trainer(urls(*proxies), base_model, **PATIENT)
    generation = trainer.vllm_generation
    reports = reported(trainer)
    randomize_adapter(trainer.model, seed=1)
    generation.sync_weights()

    def kill(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/completions" and second.is_running():
            second.kill()
        return body

    proxies[1].before = kill
    assert is_policy_of(trainer.model, sample(generation, PROMPTS))
    assert not second.is_running()

    proxies[1].before = lambda path, body: body
    second.launch()  # the sync waits for it
    randomize_adapter(trainer.model, seed=2)
    generation.sync_weights()

    assert [report.servers for report in reports] == [2, 2]
    first_has, second_has = (adapters_on(proxy.target).keys() for proxy in proxies)
    # The version of the last sync, and the active version before it.
    assert first_has == second_has == {report.adapter_name for report in reports}
    assert is_policy_of(trainer.model, sample(generation, PROMPTS))
    assert is_policy_of(trainer.model, sampled_by(trainer, 1, reports[-1].adapter_name))


@pytest.mark.slow
def test_a_dead_server_is_dropped_if_told_so_and_taken_back_by_a_later_sync(
    make_trainer: Make,
    clean_server: VLLMServer,
    second: VLLMServer,
    base_model: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(urls(clean_server, second), base_model, lora_sync_on_server_loss="drop", **PATIENT)
    generation = trainer.vllm_generation
    reports = reported(trainer)
    generation.sync_weights()
    second.kill()

    with monkeypatch.context() as patch:
        patch.setattr(trl_lora_sync.servers.handle, "wait_until_up", time_is_over)
        randomize_adapter(trainer.model, seed=1)
        generation.sync_weights()
    assert is_policy_of(trainer.model, sample(generation, PROMPTS))

    second.start()
    monkeypatch.setitem(vars(TIMEOUTS), "probe_s", 60.0)  # the cores may be busy
    randomize_adapter(trainer.model, seed=2)
    generation.sync_weights()
    assert [report.servers for report in reports] == [2, 1, 2]
    assert reports[-1].adapter_name in adapters_on(second.base_url)
    assert is_policy_of(trainer.model, sampled_by(trainer, 1, reports[-1].adapter_name))


async def time_is_over(*args: Any, deadline: Deadline, **kwargs: Any) -> None:
    """In place of a wait for a server, so that no test waits as long as a server may take on a busy machine."""
    raise deadline.error()


def sampled_by(trainer: GRPOTrainer, place: int, adapter_name: str) -> list[Row]:
    """Samples of one server of the fleet, from direct requests."""
    engine = Blocking(trainer.vllm_generation.sync.fleet.servers[place].engine)
    groups = [PromptGroup(prompt=prompt, count=1) for prompt in PROMPTS]
    answers = engine.generate(adapter_name, groups, sampling(max_tokens=16), soon(60))
    return [
        (found.prompt_ids, found.token_ids, torch.tensor([token[0] for token in found.logprobs or []]))
        for (found,) in answers
    ]


def test_vllm_and_sglang_serve_one_adapter_together(clean_server: VLLMServer, base_model: Path, tmp_path: Path) -> None:
    """The SGLang is a fake with its own policy, computed from the tensors that it received."""
    model = peft_model(base_model, target_modules=["q_proj", "up_proj"])  # SGLang wants their siblings as well
    randomize_adapter(model, seed=1)
    with FakeSGLang(shapes=Shapes.of_config(model.config)) as fake:
        sync = AdapterSync(mixed_settings(clean_server, fake, tmp_path))
        try:
            line = sync.start(lambda served: read(model, served), any_base(model))
            name = sync.publish(read(model, sync.form)).adapter_name
            fake.requests.clear()
            groups = [PromptGroup(prompt=prompt, count=2) for prompt in PROMPTS]
            answers = sync.generate(name, groups, sampling(), soon(60))
            by_fake = {tuple(ids) for body in fake.bodies("/generate") for ids in body["input_ids"]}
            adapter = read(model, sync.form)
        finally:
            sync.close()
        assert f"vllm {vllm_version(clean_server.base_url)}" in line
        assert "sglang 0.5.23" in line
        assert [answer[0].prompt_ids for answer in answers] == PROMPTS
        found = [completion for answer in answers for completion in answer]
        theirs = [one for one in found if tuple(one.prompt_ids) in by_fake]
        ours = [one for one in found if tuple(one.prompt_ids) not in by_fake]
        assert theirs
        assert ours
        reference = FakeReference(fake)
        for one in theirs:
            expected = reference.logprobs(adapter, one.prompt_ids, one.token_ids)
            assert [token[0] for token in one.logprobs or []] == pytest.approx(expected, abs=1e-4)
        rows = [
            (one.prompt_ids, one.token_ids, torch.tensor([token[0] for token in one.logprobs or []])) for one in ours
        ]
        assert is_policy_of(model, rows)
        assert fake.death is None
        assert fake.host_adapters == []


def read(model: Any, form: Form) -> Any:
    return read_adapter(model, dtype=torch.float32, packed_modules=form.packed_modules)


def any_base(model: Any) -> TrainedBase:
    """Never suspicious: the fake's base is another one by nature."""
    return TrainedBase(vocab_size=model.config.vocab_size, scores=([0.0] * (len(PROBE_PROMPT) - 1), 1e6))


def mixed_settings(server: VLLMServer, fake: FakeSGLang, folder: Path) -> SyncSettings:
    return plain_settings(
        [server.base_url, fake.base_url],
        folder / "sync",
        timeout_s=60.0,
        are_local=[True, False],  # so the fake is sent tensors
        dtype=torch.float32,
    )


@pytest.fixture
def replicated(base_model: Path) -> Iterator[VLLMServer]:
    """Two replicas behind one URL: vLLM gives each adapter to both, if there is one API server."""
    with VLLMServer(
        base_model,
        extra_args=["--data-parallel-size", "2", "--api-server-count", "1"],
        extra_env={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},  # replicas are separate processes
        start_timeout_s=600.0,
    ) as running:
        yield running


@pytest.mark.slow
def test_every_replica_of_a_data_parallel_server_samples_from_the_newest_version(
    replicated: VLLMServer, make_trainer: Make, base_model: Path
) -> None:
    trainer = make_trainer(replicated.base_url, base_model, **PATIENT)
    for seed in (1, 2, 3):
        randomize_adapter(trainer.model, seed=seed)
        trainer.vllm_generation.sync_weights()
        # Many requests at once, so that both replicas get some.
        rows = sample(trainer.vllm_generation, [token_ids(seed) for seed in range(24)])
        assert is_policy_of(trainer.model, rows)
