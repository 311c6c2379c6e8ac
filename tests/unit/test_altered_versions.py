"""Unit tier: a TRL or a PEFT to come, made of the installed one: used with a warning, or refused with what changed."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trl
from packaging.version import Version
from support.altered import altered_copy

from trl_lora_sync.versions import TRL

TESTS = Path(__file__).parents[1]
GENERATION, GRPO = "generation/vllm_generation.py", "trainer/grpo_trainer.py"
TRAINER = "trainer:GRPOTrainer"
ASYNC, ROLLOUTS = (f"experimental/async_grpo/async_{name}.py" for name in ("grpo_trainer", "rollout_worker"))
ASYNC_TRAINER = "async:AsyncGRPOTrainer"

# Name: (changes of files, files that are moved, what is done with it, words of the error or None)
Case = tuple[dict[str, dict[str, str]], dict[str, str], str, str | None]
TRL_CASES: dict[str, Case] = {
    "nothing": ({}, {}, TRAINER, None),
    "nothing, for RLOO": ({}, {}, "trainer:RLOOTrainer", None),
    "nothing, for distillation": ({}, {}, "trainer:DistillationTrainer", None),
    "nothing, with overlap": ({}, {}, "overlap:GRPOTrainer", None),
    "another time to sample, with overlap": (
        {GRPO: {"if self._step % generate_every == 0 or self": "if self._step % generate_every == 1 or self"}},
        {},
        "overlap:GRPOTrainer",
        "GRPOTrainer._prepare_inputs has no if self._step % generate_every == 0 or self._buffered_inputs is None:",
    ),
    "another time to sample, without overlap": (
        {GRPO: {"if self._step % generate_every == 0 or self": "if self._step % generate_every == 1 or self"}},
        {},
        TRAINER,
        None,
    ),
    "another way to tokenize, with overlap": (
        {GRPO: {"_tokenize_prompts(self, prompts: list)": "_tokenize_prompts(self, prompts: list, fast: bool = 1)"}},
        {},
        "overlap:GRPOTrainer",
        "GRPOTrainer._tokenize_prompts takes another parameter, fast",
    ),
    "the generation class in another module": (
        {GRPO: {"..generation.vllm_generation": "..generation.engines"}},
        {GENERATION: "generation/engines.py"},
        TRAINER,
        "trl.generation.vllm_generation cannot be imported (No module named 'trl.generation.vllm_generation')",
    ),
    "the trainer in another module": (
        {"trainer/__init__.py": {"grpo_trainer": "group_trainer"}},
        {GRPO: "trainer/group_trainer.py"},
        TRAINER,
        None,
    ),
    "another name of the generation class": (
        {GENERATION: {"class VLLMGeneration:": "class VLLMRollout:\n    pass\n\n\nclass Engine:"}},
        {},
        TRAINER,
        "trl.generation.vllm_generation has no class VLLMGeneration",
    ),
    "a renamed method": (
        {GENERATION: {"def sync_weights(": "def push_weights("}},
        {},
        TRAINER,
        "there is no VLLMGeneration.sync_weights",
    ),
    "a new parameter of generate": (
        {GENERATION: {"num_generations: int,\n": "num_generations: int,\n        masks: bool = False,\n"}},
        {},
        TRAINER,
        "VLLMGeneration.generate takes another parameter, masks",
    ),
    "a parameter that is gone": (
        {GENERATION: {"        min_p: float = 0.0,\n": "", "self.min_p = min_p": "self.min_p = 0.0"}},
        {},
        TRAINER,
        "VLLMGeneration takes no min_p",
    ),
    "a value that is stored under another name": (
        {GENERATION: {"self.temperature = temperature": "self.heat = temperature"}},
        {},
        TRAINER,
        "VLLMGeneration.__init__ stores no temperature before it calls _init_vllm",
    ),
    "one more value returned": (
        {GENERATION: {"return prompt_ids, completion_ids, log": "return 0, prompt_ids, completion_ids, log"}},
        {},
        TRAINER,
        "VLLMGeneration.generate returns something other than 4 values",
    ),
    "one more value taken": (
        {GRPO: {"_, completion_ids, logprobs, _ = self": "_, completion_ids, logprobs, _, masks = self"}},
        {},
        TRAINER,
        "GRPOTrainer takes something other than 4 values from generate",
    ),
    "one more argument passed": (
        {GRPO: {'profiler=profiling_context(self, "vLLM.generate"),': 'profiler=None, masks=True,'}},
        {},
        TRAINER,
        "GRPOTrainer passes masks to generate",
    ),
    "another method called": (
        {GRPO: {"self.vllm_generation.sync_weights()": "self.vllm_generation.push_weights()"}},
        {},
        TRAINER,
        "GRPOTrainer does not call sync_weights of its generation object; "
        "GRPOTrainer uses push_weights of its generation object",
    ),
    "something else read of the server": (
        {GRPO: {'server_info()["model_config"]["logprobs_mode"]': 'server_info()["scheduler_config"]["policy"]'}},
        {},
        TRAINER,
        "GRPOTrainer reads scheduler_config.policy of what get_server_info returns",
    ),
    "another name of the generation object": (
        {GRPO: {"self.vllm_generation": "self.rollout"}},
        {},
        TRAINER,
        "GRPOTrainer does not call sync_weights of its generation object; "
        "GRPOTrainer does not call generate of its generation object",
    ),
    "the generation object made elsewhere": (
        {GRPO: {"self.vllm_generation = VLLMGeneration(": "self.vllm_generation = make_generation("}},
        {},
        TRAINER,
        "GRPOTrainer does not build a VLLMGeneration",
    ),
    "a change of RLOO, for GRPO": (
        {"trainer/rloo_trainer.py": {"self.vllm_generation.sync_weights()": "self.vllm_generation.push()"}},
        {},
        TRAINER,
        None,
    ),
    "a change of RLOO": (
        {"trainer/rloo_trainer.py": {"self.vllm_generation.sync_weights()": "self.vllm_generation.push()"}},
        {},
        "trainer:RLOOTrainer",
        "RLOOTrainer does not call sync_weights of its generation object",
    ),
    "no RLOO": (
        {"__init__.py": {'"RLOOTrainer",': ""}},
        {},
        "trainer:RLOOTrainer",
        "trl has no RLOOTrainer",
    ),
    "the hooks of DeepSpeed under another name": (
        {"models/utils.py": {"def remove_hooks(": "def without_hooks("}, "models/__init__.py": {}},
        {},
        TRAINER,
        "trl.models.utils has no remove_hooks",
    ),
    "another name of the parser of the script": (
        {"scripts/grpo.py": {"def make_parser(": "def build_parser("}},
        {},
        "script:grpo",
        "trl.scripts.grpo has no make_parser",
    ),
    "nothing, asynchronous": ({}, {}, ASYNC_TRAINER, None),
    "the asynchronous trainer elsewhere": (
        {ASYNC: {"from .async_rollout_worker": "from .rollouts"}},
        {ROLLOUTS: "experimental/async_grpo/rollouts.py"},
        ASYNC_TRAINER,
        "trl.experimental.async_grpo.async_rollout_worker cannot be imported",
    ),
    "another name of the rollout loop": (
        {ROLLOUTS: {"_AsyncRolloutLoop": "_RolloutLoop"}},
        {},
        ASYNC_TRAINER,
        "trl.experimental.async_grpo.async_rollout_worker has no class _AsyncRolloutLoop",
    ),
    "a new parameter of a rollout": (
        {ROLLOUTS: {"list[Callable], group_id: int = 0": "list[Callable], group_id: int = 0, turn: int = 0"}},
        {},
        ASYNC_TRAINER,
        "_AsyncRolloutLoop._generate_one takes another parameter, turn",
    ),
    "another version in a sample": (
        {ROLLOUTS: {"model_version=self.model_version,": "model_version=self.newest(),"}},
        {},
        ASYNC_TRAINER,
        "_AsyncRolloutLoop._generate_loop has no model_version=self.model_version",
    ),
    "more in a rollout": (
        {ROLLOUTS: {"tool_call_count, tool_failure_count, None\n": "tool_call_count, tool_failure_count, None, 0\n"}},
        {},
        ASYNC_TRAINER,
        "_AsyncRolloutLoop._generate_one has no return (completion, completion_ids, sequences, tool_call_count",
    ),
    "another use of the rollout worker": (
        {ASYNC: {"self.rollout_worker.stop()": "self.rollout_worker.join()"}},
        {},
        ASYNC_TRAINER,
        "AsyncGRPOTrainer uses join of its AsyncRolloutWorker",
    ),
    "another time to sync the asynchronous trainer": (
        {ASYNC: {"StepIntervalCallback(self._sync_weight, ": "StepIntervalCallback(self._push, "}},
        {},
        ASYNC_TRAINER,
        "AsyncGRPOTrainer has no StepIntervalCallback(self._sync_weight, self.args.weight_sync_steps)",
    ),
    "nothing, for the script": ({}, {}, "script:grpo", None),
    "nothing, for the command": ({}, {}, "command:", None),
    "what launches a command elsewhere": (
        {},
        {"cli/accelerate_config.py": "cli/configs.py"},
        "command:",
        "trl.cli.accelerate_config cannot be imported",
    ),
}  # fmt: skip
LAYER = "tuners/lora/layer.py"
PEFT_CASES: dict[str, Case] = {
    "nothing": ({}, {}, "peft", None),
    "another name of the scaling": (
        {LAYER: {"self.scaling": "self.factors"}},
        {},
        "peft",
        "scaling of a LoRA layer is gone",
    ),
    "another product": (
        {LAYER: {"lora_B(lora_A(dropout(x))) * scaling": "lora_B(lora_A(dropout(x))).tanh() * scaling"}},
        {},
        "peft",
        "a LoRA layer computes something other than scaling * lora_B @ lora_A",
    ),
    "another class of layers": (
        {"tuners/lora/__init__.py": {"\n__all__ = [": "\nclass LoraLayer:\n    pass\n\n\n__all__ = ["}},
        {},
        "peft",
        "there is no LoraLayer at base_model.model.linear",
    ),
}  # fmt: skip


def try_all(package: str, version: str, cases: dict[str, Case], folder: Path) -> dict[str, dict[str, Any]]:
    orders = []
    for number, (edits, moved, action, _) in enumerate(cases.values()):
        copy = folder / f"{number}"
        copy.mkdir()
        altered_copy(package, copy, edits, version=version, moved=moved)
        orders.append({"folder": str(copy), "action": action})
    return dict(zip(cases, ask(orders), strict=True))


def ask(orders: list[dict[str, str]]) -> list[dict[str, Any]]:
    path = os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])])
    # Nothing may be written beside the originals, to which the copies link.
    env = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, TESTS / "support" / "altered.py", json.dumps(orders)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False, env=env)
    assert done.returncode == 0, done.stderr
    answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return answers


# On Python 3.10 the newest is 1.14.
of_the_newest = pytest.mark.skipif(
    Version(trl.__version__) < TRL.newest, reason="the lines that are altered are of a newer TRL than the installed one"
)


@pytest.fixture(scope="module")
def trls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return try_all("trl", "1.17.0", TRL_CASES, tmp_path_factory.mktemp("trl"))


@pytest.fixture(scope="module")
def pefts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return try_all("peft", "0.22.0", PEFT_CASES, tmp_path_factory.mktemp("peft"))


@pytest.mark.slow
@of_the_newest
@pytest.mark.parametrize("case", [name for name, case in TRL_CASES.items() if case[-1] is None])
def test_newer_trl_in_which_all_is_there_is_used_with_one_warning(case: str, trls: dict[str, dict[str, Any]]) -> None:
    assert trls[case]["error"] is None, trls[case]
    [warning] = trls[case]["warned"]
    assert warning == (
        "TRL 1.17.0 is newer than 1.16, the last that adapter sync was written for. It passed every check and is used. "
        "Tested with TRL 1.11.0, 1.12.0, 1.13.0, 1.14.2, 1.15.0 and 1.16.0."
    )


@pytest.mark.slow
@of_the_newest
@pytest.mark.parametrize("case", [name for name, case in TRL_CASES.items() if case[-1] is not None])
def test_newer_trl_in_which_something_changed_is_refused_with_what_it_is(
    case: str, trls: dict[str, dict[str, Any]]
) -> None:
    found = trls[case]
    assert found["error"] == "UnsupportedTRLError", found
    assert TRL_CASES[case][-1] in found["message"]
    assert found["message"].startswith("TRL 1.17.0 is installed, which adapter sync cannot use: ")
    oldest = "1.14" if TRL_CASES[case][2] == ASYNC_TRAINER else "1.11"
    assert f"Install one of these with: pip install 'trl>={oldest},<1.17'" in found["message"]


@pytest.mark.slow
@pytest.mark.parametrize("case", PEFT_CASES)
def test_newer_peft_is_used_with_one_warning_or_refused_with_what_changed(
    case: str, pefts: dict[str, dict[str, Any]]
) -> None:
    found, words = pefts[case], PEFT_CASES[case][-1]
    if words is None:
        assert found["error"] is None, found
        [warning] = found["warned"]
        assert warning.startswith("PEFT 0.22.0 is newer than 0.21, the last that adapter sync was written for.")
        assert "Tested with PEFT 0.18.0, 0.18.1, 0.19.1, 0.20.0, 0.21.0 and 0.21.2." in warning
    else:
        assert found["error"] == "UnsupportedPEFTError", found
        assert words in found["message"]
        assert "pip install 'peft>=0.18,<0.22'" in found["message"]
