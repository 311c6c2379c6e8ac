"""Measure what a sync costs on a running server: writing and loading an adapter, against PEFT's save_pretrained.

Prints the medians of each part, and how fast the server decodes through the base and through the adapter. Every load
is checked against PEFT's own log-probabilities. The server must see the folder that is written (see --dir), and serve
--model with at least the largest of --ranks.
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from trl_lora_sync.cli.console import UsageError, out
from trl_lora_sync.cli.urls import checked_url

QUICK: dict[str, Any] = {"ranks": [8], "repeats": 3, "warmup": 1}
QUICK |= {"concurrency": [1, 4], "new_tokens": 16, "decode_repeats": 2}


def add_arguments(parser: argparse.ArgumentParser, *, needs_server: bool = True) -> None:
    parser.add_argument("--url", required=needs_server, help="a running server that serves --model")
    parser.add_argument("--model", type=Path, required=needs_server, help="local folder of the model")
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


def run(args: argparse.Namespace, rest: list[str]) -> int:
    if rest:
        raise UsageError(f"nothing may follow --, but {' '.join(rest)} does.")
    if not args.model.is_dir():
        raise UsageError(f"--model {args.model} is no folder. Give the one that the server was started with.")
    args.url = checked_url(args.url)
    if args.quick:
        vars(args).update(QUICK)
    keep(measure(args), args.out)
    return 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure, and print the tables."""
    import torch
    from transformers.utils import logging as transformers_logging

    from trl_lora_sync.cli.sync_cost import measure, print_result

    torch.set_num_threads(args.threads)
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    result = measure(args)
    print_result(result)
    return result


def keep(result: dict[str, Any], file: Path | None) -> None:
    """Write all samples as JSON."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(result, indent=1) + "\n")
        out().print(f"Written to {os.path.relpath(file)}")
