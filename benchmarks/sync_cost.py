"""What a sync costs: writing and loading an adapter, against PEFT's save_pretrained.

    python benchmarks/sync_cost.py                                   # a made model, a vLLM server on this CPU
    python benchmarks/sync_cost.py --model MODEL --url http://localhost:8000 --device cuda
    python benchmarks/sync_cost.py --quick                           # a minute at most, to see that it still works

Prints the medians of each part, and how fast the server decodes through the base and through the adapter. Every load
is checked against PEFT's own log-probabilities. benchmarks/sync_measure.py describes the method.

A server at --url must serve --model with at least the largest of --ranks, and see the folder that is written (--dir).
--model is a local folder: for a hub name, `save_pretrained` may send a request to the hub each time.
"""

import argparse
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sync_measure import measure, print_result
from transformers.utils import logging as transformers_logging

from trl_lora_sync.cli.console import UsageError
from trl_lora_sync.cli.urls import checked_urls
from trl_lora_sync.engines.vllm.spec import VLLM
from trl_lora_sync.errors import LoRASyncError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
from make_model import make_model  # noqa: E402
from vllm_server import ServerStartError, VLLMServer  # noqa: E402

QUICK: dict[str, Any] = {"ranks": [8], "repeats": 3, "warmup": 1, "hidden": 128, "layers": 2}
QUICK |= {"concurrency": [1, 4], "new_tokens": 16, "decode_repeats": 2}
# One layer of these is one layer of Qwen3-0.6B.
QWEN3_LAYER = {"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@contextlib.contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of the model: given, or made here and removed afterwards."""
    if args.model:
        yield args.model
        return
    with tempfile.TemporaryDirectory(prefix="sync-cost-") as folder:
        layer = QWEN3_LAYER if args.hidden >= 512 else {}
        shape = {"hidden_size": args.hidden, "num_hidden_layers": args.layers, "initializer_range": 0.02, **layer}
        yield make_model(Path(folder) / model_name(args), **shape)


@contextlib.contextmanager
def server_url(args: argparse.Namespace, folder: Path) -> Iterator[str]:
    """The URL of the server: the one given, or one started on this CPU and stopped afterwards."""
    if args.url:
        yield args.url
        return
    key = os.environ.get("VLLM_API_KEY")
    with VLLMServer(folder, max_lora_rank=VLLM.allowed_max_lora_rank(max(args.ranks)), api_key=key) as server:
        yield server.base_url
        Path(server.log_path).unlink(missing_ok=True)


def model_name(args: argparse.Namespace) -> str:
    return args.model.resolve().name if args.model else f"qwen3-{args.hidden}x{args.layers}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="a running server that serves --model (default: one started on this CPU)")
    parser.add_argument("--model", type=Path, help="local folder of the model (default: one made here)")
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 32], help="LoRA ranks (default: 8 32)")
    parser.add_argument(
        "--dtype", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16", "float32"],
        help="dtypes to export in; the first is the served one (default: bfloat16 float32)",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=15, help="measured syncs per arm and rank (default: 15)")
    parser.add_argument("--warmup", type=int, default=2, help="syncs per arm and rank before that (default: 2)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8], help="requests at once (default: 1 8)")
    parser.add_argument("--new-tokens", type=int, default=32, help="length of each completion (default: 32)")
    parser.add_argument("--decode-repeats", type=int, default=3, help="measured decodings per point (default: 3)")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where the trainer's model is")
    parser.add_argument("--threads", type=int, default=1, help="of torch; `accelerate launch` sets 1 on GPU hosts")
    parser.add_argument("--dir", type=Path, help="folder shared with the server (default: as in training)")
    parser.add_argument("--server-dir", help="the same folder as the server sees it")
    parser.add_argument("--out", type=Path, help="JSON file for all samples")
    parser.add_argument("--quick", action="store_true", help="few and short, to see that it works")
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the made Qwen3")
    parser.add_argument("--layers", type=int, default=8, help="layers of the made Qwen3")
    args = parser.parse_args()
    if args.url and not args.model:
        parser.error("--url needs --model: the local folder of the model that the server serves")
    if args.model and not args.model.is_dir():
        parser.error(f"--model {args.model} is not a folder. Give the folder of the server's model.")
    try:
        if args.url:
            [args.url] = checked_urls(args.url)
    except UsageError as error:
        parser.error(str(error))
    if args.quick:
        vars(args).update(QUICK)
    elif args.out is None:
        args.out = ROOT / "benchmarks" / "results" / f"{model_name(args)}-{args.device}.json"
    return args


def main() -> None:
    args = parse_args()
    started, made = not args.url, not args.model
    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        with model_folder(args) as args.model, server_url(args, args.model) as args.url:
            result = measure(args)
    except (LoRASyncError, ServerStartError) as error:
        sys.exit(f"The benchmark failed. {error}")
    print_result(result)
    if args.out is not None:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        result |= {"started_by_this_script_on_the_cpu": started, "model_is_made": made}
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(f"Written to {os.path.relpath(args.out)}")


if __name__ == "__main__":
    main()
