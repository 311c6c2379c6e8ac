"""TRL's own tests of its trainers, with TRL's classes and with this package's: does anything differ?

    git clone https://github.com/huggingface/trl
    python benchmarks/trls_own_tests.py --trl trl --out benchmarks/results/trls-own-tests-cpu.json

Runs the files of tests twice, in the environment of this interpreter, with nothing else changed than the classes that
`from trl import ...` gives. The settings are their defaults, so each test must end in the same way.

The tests load small models and data from the Hub. Stand-ins are made here, in a cache that Transformers reads without
the Hub: random weights, a tokenizer of bytes, and sentences of this file. A test that needs another model fails in
both runs, and is counted apart; so is a test that needs a package not installed here.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo"), str(ROOT / "benchmarks")]

FILES = ("test_grpo_trainer.py", "test_rloo_trainer.py")
CLASSES = ("GRPOConfig", "GRPOTrainer", "RLOOConfig", "RLOOTrainer")
OURS_VARIABLE = "TRLS_OWN_TESTS_WITH_OURS"
ORGANIZATION = "trl-internal-testing"
# Model type and chat template of TRL, by the name on the Hub without its organization.
CAUSAL = {
    "tiny-Qwen2ForCausalLM-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen3ForCausalLM": ("qwen3", "qwen3"),
    "tiny-Qwen3MoeForCausalLM": ("qwen3_moe", "qwen3"),
    "tiny-LlamaForCausalLM-3.2": ("llama", "llama3_2"),
    "tiny-MistralForCausalLM-0.2": ("mistral", "qwen2_5"),
    "tiny-Cohere2ForCausalLM": ("cohere2", "cohere2"),
    "tiny-Gemma2ForCausalLM": ("gemma2", "gemma"),
}
REWARDS = {
    "tiny-Qwen2ForSequenceClassification-2.5": ("qwen2", "qwen2_5"),
    "tiny-Qwen3ForSequenceClassification": ("qwen3", "qwen3"),
    "tiny-LlamaForSequenceClassification-3.2": ("llama", "llama3_2"),
}
SHAPE = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 2,
    "num_experts": 4,
    "moe_intermediate_size": 8,
}
SENTENCES = (
    "The tide comes in twice a day",
    "A good map leaves things out",
    "Bread needs time more than skill",
    "Old clocks lose a minute each week",
    "The ferry leaves at nine",
    "Snow makes a town quiet",
    "Rivers remember their valleys",
    "The baker opens before dawn",
    "Two roads meet at the mill",
    "An apple falls close to the tree",
    "Lanterns hang along the harbour",
    "The library closes at six",
    "Goats climb where roads end",
    "A kettle sings before it boils",
    "The north wind brings salt",
    "Letters arrive on Thursdays",
    "The bridge is older than the church",
    "Wool is warmer when it is wet",
    "The last train waits for no one",
)
OF_TEST = 2


def main() -> None:
    args = parse_args()
    tests = args.trl / "tests"
    with tempfile.TemporaryDirectory(prefix="trls-own-tests-") as folder:
        make_hub_cache(Path(folder) / "hub")
        ended = {
            whose: run_tests(tests, args.files, Path(folder), whose, args.pytest)
            for whose in ("TRL's", "this package's")
        }
    result = compared(ended) | {"revision_of_the_tests": revision(args.trl)}
    result = {"benchmark": "TRL's own tests", **environment(), "files": args.files, **result}
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(bool(result["different"]) or not result["tests"])


def make_hub_cache(cache: Path) -> None:
    """Write the stand-ins as the Hub's client caches downloads: `models--ORGANIZATION--NAME/snapshots/REVISION`."""
    import torch
    import transformers
    import trl
    from make_model import make_tokenizer

    templates = Path(trl.__file__).parent / "chat_templates"
    kinds = {name: (transformers.AutoModelForCausalLM, kind) for name, kind in CAUSAL.items()}
    kinds |= {name: (transformers.AutoModelForSequenceClassification, kind) for name, kind in REWARDS.items()}
    for name, (model_class, (model_type, template)) in kinds.items():
        repository = cache / f"models--{ORGANIZATION}--{name}"
        snapshot = repository / "snapshots" / "0"
        tokenizer = make_tokenizer()
        tokenizer.chat_template = (templates / f"{template}.jinja").read_text()
        config = transformers.AutoConfig.for_model(
            model_type,
            vocab_size=len(tokenizer),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            **({"num_labels": 1} if name in REWARDS else {}),
            **SHAPE,
        )
        torch.manual_seed(0)
        # As those on the Hub: in bfloat16, but for the classifiers.
        model = model_class.from_config(config).to(torch.float32 if name in REWARDS else torch.bfloat16)
        model.save_pretrained(snapshot)
        tokenizer.save_pretrained(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text("0")


def run_tests(tests: Path, files: list[str], folder: Path, whose: str, more: list[str]) -> dict[str, tuple[str, str]]:
    """How each test ended and, if it failed, the first line of its error."""
    report = folder / f"{whose}.xml"
    env = os.environ | {
        "HF_HUB_CACHE": str(folder / "hub"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]),
        OURS_VARIABLE: str(int(whose != "TRL's")),
    }
    command = [sys.executable, "-m", "pytest", "-p", Path(__file__).stem, *files, f"--junitxml={report}", "-q", *more]
    subprocess.run(command, cwd=tests, env=env, check=False)
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = next((one for one in case if one.tag in ("failure", "error", "skipped")), None)
        words = "" if bad is None else (bad.get("message") or "").splitlines()[0][:200]
        found[name] = ("passed" if bad is None else bad.tag, words)
    return found


def compared(ended: dict[str, dict[str, tuple[str, str]]]) -> dict[str, Any]:
    first, second = ended.values()
    names = first.keys() | second.keys()
    none = ("absent", "")
    return {
        "tests": len(names),
        "outcomes": {whose: dict(Counter(outcome for outcome, _ in found.values())) for whose, found in ended.items()},
        "different": {
            name: {whose: found.get(name, none) for whose, found in ended.items()}
            for name in sorted(names)
            if first.get(name, none)[0] != second.get(name, none)[0]
        },
        "failed_in_both": {
            name: first[name][1] for name in sorted(first) if first[name][0] in ("failure", "error") and name in second
        },
    }


def environment() -> dict[str, Any]:
    from run_environment import run_environment
    from versus.results import command_line

    return run_environment() | {"command": f"{command_line(('--trl', '--out'))} --trl trl"}


def revision(checkout: Path) -> str:
    asked = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()


# In the processes that run the tests, of which this module is a plugin


def pytest_configure() -> None:
    import datasets
    import trl

    datasets.load_dataset = load_dataset
    if os.environ[OURS_VARIABLE] == "1":
        import trl_lora_sync

        for name in CLASSES:
            setattr(trl, name, getattr(trl_lora_sync, name))


def load_dataset(path: str, name: str | None = None, split: str | None = None, streaming: bool = False) -> Any:
    """The stand-in of `datasets.load_dataset` for the data of these tests."""
    import datasets

    if path != f"{ORGANIZATION}/zen" or not name or not name.endswith("prompt_only"):
        raise ConnectionError(f"there is no stand-in for {path}, {name}")
    is_conversational = name.startswith("conversational")
    rows = [[{"role": "user", "content": one}] if is_conversational else one for one in SENTENCES]
    parts = {
        "train": datasets.Dataset.from_dict({"prompt": rows[:-OF_TEST]}),
        "test": datasets.Dataset.from_dict({"prompt": rows[-OF_TEST:]}),
    }
    if streaming:
        streams = datasets.IterableDatasetDict({key: part.to_iterable_dataset() for key, part in parts.items()})
        return streams[split] if split else streams
    return parts[split] if split else datasets.DatasetDict(parts)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl", type=Path, required=True, help="checkout of TRL, for its tests only")
    parser.add_argument("--files", nargs="+", default=list(FILES))
    parser.add_argument(
        "--pytest", type=shlex.split, default=[], help="more arguments of pytest, such as --pytest='-k beta'"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
