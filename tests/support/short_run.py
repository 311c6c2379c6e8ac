"""A short GRPO run with an evaluation after it, and a step of each other trainer: python short_run.py URL MODEL FOLDER

Writes FOLDER/result.json.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch
import trl
import trl.trainer.utils
from packaging.version import Version

from support.kinds import KINDS
from support.processes import leave_imports_to_parent
from support.trainers import grpo_trainer, prompts
from trl_lora_sync.errors import UnsupportedSettingError
from trl_lora_sync.scripts.grpo import make_parser
from trl_lora_sync.versions import TRL_ASYNC

# A TRL to come, in which nothing has changed.
NEWER = "1.99.0"


class PlainLogProbs:
    """The log-probabilities of TRL 1.15 in plain torch.

    That version computes them with a Triton kernel alone, so it trains on GPUs only; 1.16 also has a torch path.
    """

    @staticmethod
    def apply(hidden, weight, bias, targets, temperature, *_args):  # type: ignore[no-untyped-def]
        logps = (torch.nn.functional.linear(hidden, weight, bias).float() / temperature).log_softmax(-1)
        entropy = -(logps.exp() * logps).sum(-1)
        return logps.gather(1, targets.unsqueeze(1)).squeeze(1), entropy, None, None, None


def main(base_url: str, model: str, folder: str) -> None:
    torch.set_num_threads(1)
    leave_imports_to_parent()  # of this TRL; each training collects garbage several times
    if trl.__version__.startswith("1.15."):
        trl.trainer.utils._ChunkedLogProbFunction = PlainLogProbs
    trainer = grpo_trainer(
        base_url, Path(model), Path(folder), eval_dataset=prompts(["evening"]), per_device_eval_batch_size=4
    )
    trainer.train()
    evaluated = trainer.evaluate()
    flags = ["--output_dir", folder, "--use_cpu", "True", "--bf16", "False", "--lora_sync_keep", "7"]
    _, config, *_, left = make_parser().parse_args_and_config([*flags, "--num_processes", "2"], True)
    others = {kind: versions_of(kind, base_url, Path(model), Path(folder)) for kind in other_kinds(trl.__version__)}
    result = {
        "refused": refusal_without_mixin(trainer),
        "others": others,
        "asynchronous": asynchronous_versions(base_url, Path(model), Path(folder)),
        "script": [type(config).__module__, config.lora_sync_keep, left],
        "trl": trl.__version__,
        "trl_path": trl.__file__,
        "vllm": sys.modules.get("vllm") is not None,
        "log": trainer.state.log_history,
        "evaluated": evaluated,
        "moved": any(bool(value.any()) for name, value in trainer.model.named_parameters() if "lora_B" in name),
    }
    (Path(folder) / "result.json").write_text(json.dumps(result))
    # No clean-up here: the evaluation's version is withdrawn at exit.


def refusal_without_mixin(trainer: trl.GRPOTrainer) -> str:
    """What TRL's trainer answers to the configuration of one with the mixin."""
    try:
        trl.GRPOTrainer(trainer.model.get_base_model(), len, trainer.args, trainer.train_dataset)
    except UnsupportedSettingError as error:
        return str(error)
    return ""


def other_kinds(version: str) -> list[str]:
    """The `KINDS` that train without a GPU: the loss of distillation is a Triton kernel in TRL 1.15.

    Of `NEWER` there is one: it is the installed TRL, with which the live tests train all kinds.
    """
    if version == NEWER:
        return ["rloo"]
    without = {"grpo", "distillation"} if version.startswith("1.15.") else {"grpo"}
    return [kind for kind in KINDS if kind not in without]


def versions_of(kind: str, base_url: str, model: Path, folder: Path) -> list[float]:
    """The versions that a run of two steps logs, with the served model as the teacher where there is one."""
    trainer = KINDS[kind].make(base_url, model, folder / kind, model, max_steps=2)
    trainer.train()
    return [entry["lora_sync/version"] for entry in trainer.state.log_history if "lora_sync/version" in entry]


def asynchronous_versions(base_url: str, model: Path, folder: Path) -> list[float] | None:
    """The versions that a run of two steps of AsyncGRPO logs; None if this TRL cannot train an adapter with it."""
    if Version(trl.__version__) < TRL_ASYNC.oldest:
        return None
    if Version(trl.__version__) < Version("1.16") and find_spec("aiohttp") is None:  # imported for TRL's requests
        stand_in = ModuleType("aiohttp")
        stand_in.ClientError, stand_in.ClientSession = OSError, object  # type: ignore[attr-defined]
        sys.modules["aiohttp"] = stand_in
    from tree_attention import plain_kernel

    from support.async_runs import async_trainer

    with plain_kernel():
        # The server has room for two versions.
        trainer = async_trainer(base_url, model, folder / "async", max_steps=2, max_staleness=0)
        trainer.train()
    return [entry["lora_sync/version"] for entry in trainer.state.log_history if "lora_sync/version" in entry]


if __name__ == "__main__":
    main(*sys.argv[1:])
