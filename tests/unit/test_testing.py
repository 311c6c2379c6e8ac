"""Unit tier: what other people's tests import, used as they do."""

import ast
import queue
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from contract.served import PROMPT, SMALL, sampling, soon
from make_model import make_model
from support.models import lora, peft_model, randomize_adapter
from support.trainers import grpo_trainer, steps_of

import trl_lora_sync.testing
from trl_lora_sync.adapter.export import read_adapter
from trl_lora_sync.engines.base import PromptGroup
from trl_lora_sync.errors import AdapterRejectedError, GenerationError, ServerUnreachableError
from trl_lora_sync.testing import (
    FakeSGLang,
    ModelPolicy,
    ToyPolicy,
    in_memory_engines,
    random_adapter,
    serving_sglang,
)
from unit.fleets import InMemoryRun, small_adapter


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def run(tmp_path: Path) -> Iterator[InMemoryRun]:
    with in_memory_engines(2, shapes=SMALL) as engines:
        begun = InMemoryRun(engines, tmp_path)
        yield begun
        begun.sync.shutdown()


def test_a_sync_runs_on_engines_in_memory_without_a_connection(run: InMemoryRun) -> None:
    assert run.samples_from(1)
    run.sync.publish(small_adapter(2))
    assert run.samples_from(2)
    for engine in run.engines:
        assert [name.rpartition("-")[2] for method, name in engine.calls if method == "load"][-2:] == ["v1", "v2"]


def test_an_error_of_one_engine_leaves_the_version_before_active_on_all(run: InMemoryRun) -> None:
    run.engines[1].errors["load"] = [AdapterRejectedError("no room")]
    with pytest.raises(AdapterRejectedError, match="no room"):
        run.sync.publish(small_adapter(2))
    assert run.samples_from(1)
    run.sync.publish(small_adapter(3))
    assert run.samples_from(3)


def test_an_engine_that_restarts_gets_the_active_version_again(run: InMemoryRun) -> None:
    run.engines[0].restart()
    run.engines[0].calls.clear()
    assert run.samples_from(1)
    assert [name.rpartition("-")[2] for method, name in run.engines[0].calls if method == "load"] == ["v1"]


def test_an_engine_that_is_down_raises_what_a_server_does(tmp_path: Path) -> None:
    with in_memory_engines(shapes=SMALL) as [engine]:
        begun = InMemoryRun([engine], tmp_path, sync_timeout_s=0.3)
        engine.is_up = False
        with pytest.raises(ServerUnreachableError, match=re.escape(engine.base_url)):
            begun.sync.publish(small_adapter(2))
        engine.is_up = True
        begun.sync.publish(small_adapter(2))
        assert begun.samples_from(2)
        begun.sync.shutdown()


def test_an_engine_in_memory_refuses_another_models_adapter(run: InMemoryRun) -> None:
    wide = random_adapter(trl_lora_sync.testing.Shapes(), 1, rank=8)
    with pytest.raises(AdapterRejectedError, match="does not fit the base model"):
        run.sync.publish(wide)


@pytest.mark.parametrize("regex", ["[^,]{3}", r"\D{2}\W\S", r"[^\D]{3}"])
def test_a_sample_keeps_to_characters_that_are_excluded(regex: str, run: InMemoryRun) -> None:
    """One excluded character, or the opposite of a category, ended in an error of the engine."""
    assert run.sync.active is not None
    group = PromptGroup(prompt=PROMPT, count=4)
    [found] = run.sync.generate(run.sync.active.name, [group], sampling(regex=regex), soon())
    texts = [run.engines[0].args.text_of(completion.token_ids) for completion in found]
    assert all(re.fullmatch(regex, text) for text in texts), texts


def test_memory_that_is_released_cannot_be_sampled_from(tmp_path: Path) -> None:
    with in_memory_engines(shapes=SMALL) as [engine]:
        begun = InMemoryRun([engine], tmp_path, frees_kv_cache=True)
        begun.sync.sleep()
        assert engine.is_asleep
        with pytest.raises(GenerationError, match="KV cache"):
            begun.sample()
        assert begun.sync.wake()
        assert begun.samples_from(1)
        begun.sync.shutdown()


def test_a_served_model_computes_what_peft_does(model: Path) -> None:
    trained = peft_model(model, target_modules=["q_proj", "v_proj", "down_proj"])
    randomize_adapter(trained, seed=1)
    ids = [11, 48, 85, 122]
    with torch.no_grad():
        expected = trained(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
    policy = ModelPolicy(model)
    tensors = read_adapter(trained, dtype=torch.float32).tensors
    found = policy.logprobs(tensors, 1.0, ids[:1], ids[1:])
    assert found == pytest.approx([float(expected[place, token]) for place, token in enumerate(ids[1:])], abs=1e-4)
    base = policy.logprobs(None, 1.0, ids[:1], ids[1:])
    assert max(abs(a - b) for a, b in zip(found, base, strict=True)) > 0.05


class SlowPolicy(ToyPolicy):
    """A base model whose forward passes end when they may."""

    def __init__(self) -> None:
        super().__init__(SMALL, 0)
        self.began, self.may_end = threading.Event(), threading.Event()

    def logits_of(self, patch: Any, context: Any) -> Any:
        self.began.set()
        assert self.may_end.wait(30)
        return super().logits_of(patch, context)


@pytest.mark.outside
def test_a_sample_that_runs_at_a_restart_ends_in_the_server_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in the new server, which counted one request too few from then on, and never ended a pause."""
    policy, ends = SlowPolicy(), queue.Queue[str | None]()
    with FakeSGLang(shapes=SMALL, policy=policy) as fake, ThreadPoolExecutor() as pool:
        fake.edit_output = lambda output: ends.put(fake.death)
        body = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 1}}
        sample = pool.submit(httpx.post, f"{fake.base_url}/generate", json=body, timeout=30)
        assert policy.began.wait(30)
        wait_until = fake.wait_until

        def wait(is_so: Callable[[], bool]) -> None:
            policy.may_end.set()
            wait_until(is_so)

        monkeypatch.setattr(fake, "wait_until", wait)
        restarted = pool.submit(fake.restart)
        # In case that a restart does not wait.
        restarted.add_done_callback(lambda _: policy.may_end.set())
        assert ends.get(timeout=30) == "stopped"
        restarted.result(30)
        assert isinstance(sample.exception(30), httpx.TransportError)
        assert httpx.post(f"{fake.base_url}/pause_generation", json={"mode": "abort"}, timeout=30).status_code == 200


@pytest.mark.outside
@pytest.mark.slow
@pytest.mark.parametrize("where", ["over HTTP", "in memory"])
def test_a_trainer_trains_with_all_checks_and_no_engine(where: str, model: Path, tmp_path: Path) -> None:
    with serving_sglang(model) if where == "over HTTP" else in_memory_engines(model_path=model) as served:
        base_url = served.base_url if where == "over HTTP" else served[0].base_url  # type: ignore[union-attr,index]
        peft_config = lora(target_modules=["q_proj", "k_proj", "v_proj", "down_proj"])
        trainer = grpo_trainer(base_url, model, tmp_path, peft_config=peft_config, max_steps=2, max_completion_length=6)
        trainer.train()
    steps = [step for step in steps_of(trainer) if "lora_sync/version" in step]
    assert [step["lora_sync/version"] for step in steps] == [1, 2]
    assert all(step["lora_sync/verified"] == 1 for step in steps)
    assert all(step["sampling/sampling_logp_difference/max"] < 1e-2 for step in steps)


def test_the_public_names_are_documented_and_need_no_test_library() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    shown = re.findall(r"^::: trl_lora_sync\.testing\.(\w+)$", page, re.MULTILINE)
    assert sorted(shown) == sorted(trl_lora_sync.testing.__all__)
    for file in Path(trl_lora_sync.testing.__file__).parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.ImportFrom)]
        assert all((node.module or "").partition(".")[0] not in ("pytest", "hypothesis") for node in imported)


@pytest.mark.outside
def test_importing_it_needs_neither_trl_nor_a_test_library() -> None:
    blocked = "import sys; sys.modules |= dict.fromkeys(('trl', 'peft', 'pytest', 'hypothesis')); "
    subprocess.run([sys.executable, "-c", f"{blocked}import trl_lora_sync.testing"], check=True, timeout=240)
