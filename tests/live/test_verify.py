"""Live tier: a real server that computes something else than the trainer's adapter is found out before a token of it.

Each mistake is made in the server's own copy of the files, which the trainer cannot see; vLLM answers 200 to all of
these.
"""

import json
import shutil
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from make_model import make_model
from safetensors.torch import load_file, save_file
from support.models import peft_model, randomize_adapter
from support.policies import is_policy_of, sample, token_ids
from support.servers import Proxy, adapters_on, is_scoring, version_of
from support.trainers import steps_of
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer, export_adapter
from trl_lora_sync.errors import ServerSetupError, VerificationError

Make = Callable[..., GRPOTrainer]
WEIGHTS = "adapter_model.safetensors"


def interfere(proxy: Proxy, change: Callable[[Path], None], *, of_trials: bool = False) -> None:
    """Let `change` modify the server's copy of each version right before its load."""

    def before(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter" and "theirs" in body["lora_path"]:
            theirs = Path(body["lora_path"])
            shutil.copytree(theirs.parents[2] / "sync" / theirs.parent.name / theirs.name, theirs)
            if of_trials or version_of(body["lora_name"]):
                change(theirs)
        return body

    proxy.before = before


@pytest.fixture
def make_trainer(make_trainer: Make, proxy: Proxy, tmp_path: Path) -> Make:
    """Trainers whose server reads from another folder, to which `interfere` copies the files."""
    interfere(proxy, lambda directory: None)

    def make(url: str, model: Path, **kwargs: Any) -> GRPOTrainer:
        server_dir = str(tmp_path / "theirs") if url == proxy.base_url else None
        return make_trainer(url, model, **{"lora_sync_server_dir": server_dir, **kwargs})

    return make


def other_prefix(directory: Path) -> None:
    """The names of a model that is wrapped once more; vLLM then serves the base model."""
    tensors = load_file(directory / WEIGHTS)
    renamed = {name.replace("model.model.", "model.policy.model."): value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, directory / WEIGHTS)


def other_scaling(directory: Path) -> None:
    config = json.loads((directory / "adapter_config.json").read_text())
    (directory / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 2 * config["lora_alpha"]}))


@pytest.mark.parametrize("mistake", [other_prefix, other_scaling])
def test_a_server_that_applies_adapters_in_another_way_is_refused_before_training(
    mistake: Callable[[Path], None], make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """The trained adapter is zero at the start, and shows nothing."""
    interfere(proxy, mistake, of_trials=True)

    with pytest.raises(VerificationError, match=r"computes something else with it.*on the server.*Likely causes"):
        make_trainer(proxy.base_url, base_model)

    assert not adapters_on(proxy.target)


def unknown_mlp(directory: Path) -> None:
    """Names of MLP tensors that the served model does not have; vLLM then serves the attention alone."""
    tensors = load_file(directory / WEIGHTS)
    renamed = {name.replace(".mlp.", ".feed.mlp."): value for name, value in tensors.items()}
    assert renamed.keys() != tensors.keys()
    save_file(renamed, directory / WEIGHTS)


def test_a_server_that_ignores_the_mlp_is_refused_before_training_with_the_names_of_its_modules(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    interfere(proxy, unknown_mlp, of_trials=True)

    with pytest.raises(VerificationError, match=r"zero outside the MLP modules \(.*layers\.\*\.mlp\.gate_proj"):
        make_trainer(proxy.base_url, base_model)

    assert not adapters_on(proxy.target)


@pytest.mark.parametrize("mistake", [other_prefix, other_scaling])
def test_an_adapter_that_the_server_applies_in_another_way_is_refused_at_the_first_sync(
    mistake: Callable[[Path], None], make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model)
    randomize_adapter(trainer.model, seed=1)
    interfere(proxy, mistake)

    with pytest.raises(VerificationError, match=r"computes something else with it.*on the server.*Likely causes"):
        trainer.vllm_generation.sync_weights()

    assert not adapters_on(proxy.target)
    interfere(proxy, lambda directory: None)
    trainer.vllm_generation.sync_weights()
    assert is_policy_of(trainer.model, sample(trainer.vllm_generation, [token_ids(1)]))


def test_a_stale_version_is_refused(make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path) -> None:
    trainer = make_trainer(proxy.base_url, base_model, lora_sync_verify="every")
    randomize_adapter(trainer.model, seed=1)
    trainer.vllm_generation.sync_weights()
    stale = tmp_path / "stale"
    shutil.copytree(trainer.vllm_generation.sync.active.path, stale)
    randomize_adapter(trainer.model, seed=2)
    interfere(proxy, lambda directory: shutil.copy(stale / WEIGHTS, directory / WEIGHTS) and None)

    with pytest.raises(VerificationError, match="answers with another version"):
        trainer.vllm_generation.sync_weights()

    assert [version_of(name) for name in adapters_on(proxy.target)] == [1]


def test_the_adapter_of_another_run_is_refused(
    make_trainer: Make, proxy: Proxy, base_model: Path, tmp_path: Path
) -> None:
    theirs = peft_model(base_model)
    randomize_adapter(theirs, seed=9)
    other = export_adapter(theirs, tmp_path / "other").path
    trainer = make_trainer(proxy.base_url, base_model)
    randomize_adapter(trainer.model, seed=1)
    interfere(proxy, lambda directory: shutil.copy(other / WEIGHTS, directory / WEIGHTS) and None)

    with pytest.raises(VerificationError):
        trainer.vllm_generation.sync_weights()


@pytest.mark.parametrize("difference", [{"seed": 1}, {"num_hidden_layers": 3}], ids=["other_weights", "other_depth"])
def test_another_base_model_is_refused_before_anything_is_loaded(
    difference: dict[str, int], make_trainer: Make, clean_server: VLLMServer, tmp_path: Path
) -> None:
    ours = make_model(tmp_path / "ours", **difference)

    with pytest.raises(ServerSetupError, match=r"it computes other log-probabilities.*set lora_sync_verify=\"off\""):
        make_trainer(clean_server.base_url, ours)


def test_a_run_is_proved_at_the_start_and_compares_its_first_version_only(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    trainer = make_trainer(proxy.base_url, base_model, max_steps=4, learning_rate=1e-6, lora_sync_verify="first")

    trainer.train()

    steps = steps_of(trainer)
    assert [step["lora_sync/verified"] for step in steps] == [1.0] * 4
    assert ["lora_sync/verify_gap" in step for step in steps] == [True, False, False, False]
    assert steps[0]["lora_sync/verify_gap"] <= steps[0]["lora_sync/verify_gap_max"] < 0.02
    assert scored(proxy) == [1]


@pytest.mark.slow
def test_a_trainer_that_rounds_more_than_its_server_is_proved(
    make_trainer: Make, base_model: Path, tmp_path: Path
) -> None:
    """TRL trains with autocast to bfloat16 by default; its base computed without was all that rounding away."""
    with VLLMServer(base_model, extra_args=["--dtype", "float32"]) as server:
        trainer = make_trainer(server.base_url, base_model, bf16=True, lora_sync_verify="every")
        trainer.train()

        steps = steps_of(trainer)
        assert [step["lora_sync/verified"] for step in steps] == [1.0] * 3
        assert trainer.accelerator.mixed_precision == "bf16"


def test_every_sync_of_a_run_can_be_verified(make_trainer: Make, proxy: Proxy, base_model: Path) -> None:
    trainer = make_trainer(proxy.base_url, base_model, max_steps=3, learning_rate=0.02, lora_sync_verify="every")

    trainer.train()

    assert scored(proxy) == [1, 2, 3]
    assert all(step["lora_sync/verify_gap"] < 0.02 for step in steps_of(trainer))


def test_a_known_difference_can_be_tolerated(make_trainer: Make, proxy: Proxy, base_model: Path) -> None:
    trainer = make_trainer(proxy.base_url, base_model, lora_sync_verify_tolerance=1e4)
    randomize_adapter(trainer.model, seed=1)
    interfere(proxy, other_scaling)

    trainer.vllm_generation.sync_weights()

    assert len(adapters_on(proxy.target)) == 1


def scored(proxy: Proxy) -> list[int | None]:
    """The versions under which the prompt was scored, in order."""
    bodies = [body for body in proxy.requests("/v1/completions") if is_scoring(body) and version_of(body["model"])]
    prompts = [body["prompt"] for body in bodies]
    singles = [one for prompt in prompts for one in (prompt if isinstance(prompt[0], list) else [prompt])]
    assert all(len(prompt) <= 64 for prompt in singles)
    return [version for version, _ in groupby(version_of(body["model"]) for body in bodies)]


# Files that are damaged where the trainer sees them


def test_a_file_that_is_damaged_before_the_server_reads_it_is_refused_at_every_sync(
    make_trainer: Make, proxy: Proxy, base_model: Path
) -> None:
    """Half of the signs of a version that is not compared with the trainer; vLLM answers 200."""

    def flip_signs(path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/v1/load_lora_adapter":
            file = Path(body["lora_path"]) / WEIGHTS
            tensors = load_file(file)
            for tensor in tensors.values():
                tensor.view(-1)[::2].neg_()
            save_file(tensors, file)
        return body

    proxy.before = lambda path, body: body
    trainer = make_trainer(proxy.base_url, base_model, lora_sync_server_dir=None)
    trainer.vllm_generation.sync_weights()
    randomize_adapter(trainer.model, seed=1, std=1e-4)
    proxy.before = flip_signs

    with pytest.raises(VerificationError, match="are not what the trainer wrote there"):
        trainer.vllm_generation.sync_weights()

    assert [version_of(name) for name in adapters_on(proxy.target)] == [1]
