"""`trl-lora-sync bench`, with a model made here and a vLLM server on this CPU unless others are given.

    python benchmarks/sync_cost.py                                   # a made model, a vLLM server on this CPU
    python benchmarks/sync_cost.py --model MODEL --url http://localhost:8000 --device cuda
    python benchmarks/sync_cost.py --quick                           # a minute at most, to see that it still works

What is measured, and how, is in trl_lora_sync/cli/sync_cost.py. Give a model by its local folder: for a hub name
`save_pretrained` may ask the hub each time.
"""

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trl_lora_sync.cli import bench
from trl_lora_sync.engines.known import allowed_max_lora_rank
from trl_lora_sync.errors import LoRASyncError

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "examples" / "demo"))
from make_model import make_model  # noqa: E402
from vllm_server import ServerStartError, VLLMServer  # noqa: E402

# One layer of these is one layer of Qwen3-0.6B.
QWEN3_LAYER = {"intermediate_size": 3072, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}


@contextlib.contextmanager
def model_folder(args: argparse.Namespace) -> Iterator[Path]:
    """The folder of the model: the one given, or a made one that is removed afterwards."""
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
        yield args.url.rstrip("/")
        return
    key = os.environ.get("VLLM_API_KEY")
    with VLLMServer(folder, max_lora_rank=allowed_max_lora_rank(max(args.ranks)), api_key=key) as server:
        yield server.base_url
        Path(server.log_path).unlink(missing_ok=True)


def model_name(args: argparse.Namespace) -> str:
    return args.model.resolve().name if args.model else f"qwen3-{args.hidden}x{args.layers}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    bench.add_arguments(parser, needs_server=False)
    parser.add_argument("--hidden", type=int, default=1024, help="hidden size of the made Qwen3")
    parser.add_argument("--layers", type=int, default=8, help="layers of the made Qwen3")
    args = parser.parse_args()
    if args.url and not args.model:
        parser.error("--url needs --model: the local folder of the model that the server serves")
    if args.quick:
        vars(args).update(bench.QUICK | {"hidden": 128, "layers": 2})
    elif args.out is None:
        args.out = ROOT / "benchmarks" / "results" / f"{model_name(args)}-{args.device}.json"
    return args


def main() -> None:
    args = parse_args()
    started, made = not args.url, not args.model
    try:
        with model_folder(args) as args.model, server_url(args, args.model) as args.url:
            result = bench.measure(args)
    except (LoRASyncError, ServerStartError) as error:
        sys.exit(f"The benchmark failed. {error}")
    bench.keep(result | {"started_by_this_script_on_the_cpu": started, "model_is_made": made}, args.out)


if __name__ == "__main__":
    main()
