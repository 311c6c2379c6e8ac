"""Adapter sync against TRL's own weight sync: seconds, bytes, decoding speed, memory, drift, and whole GRPO steps.

    python benchmarks/vs_weights.py --shapes 8b --ranks 32 8 128 256       # two GPUs or more of one host
    python benchmarks/vs_weights.py --tiny                                 # on a CPU, to see that it still works
    python benchmarks/vs_weights.py --show --page                          # the tables of what has been measured

Makes random-weight models in the shapes of Qwen3, starts the servers that the arms need, and lets the arms take turns
in every loop; benchmarks/versus/arms.py describes the arms. The first GPU trains, the others serve. Where not all
servers have room side by side, the arms follow one another in groups, which the result notes.

Everything is written to --out right after its measurement. A further run adds to that file what it lacks, and --keep
leaves the servers running for it. --budget-s ends a run in good time, with what it has; a turn that hangs, as a
collective may, ends it after five minutes.
"""

import argparse
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "demo")]

import page  # noqa: E402
from versus import table  # noqa: E402
from versus.clock import Clock, OutOfTimeError  # noqa: E402
from versus.kinds import (  # noqa: E402
    ARMS,
    OURS,
    SERVED_AS_RUNTIME,
    STEP_PROMPT_TOKENS,
    server_kind,
    server_number,
    why_left_out,
)
from versus.results import Results, command_line  # noqa: E402
from vllm_server import DEFAULT_PYTHON, PYTHON_VARIABLE  # noqa: E402

PLACES = ("--out", "--work", "--server-python")
PHASES = ("sync", "decode", "drift", "profile", "steps", "fleet")
# What is measured of a shape by default.
USUAL_PHASES = {
    "tiny": list(PHASES),
    "0.6b": ["sync", "decode", "drift", "profile", "fleet"],
    "8b": ["sync", "decode", "drift", "profile", "steps"],
    "32b": ["sync", "decode", "drift", "profile"],
}
# Above the ranks that are compared: to see how a sync grows.
GROWN_RANK = 256
USUAL_RANKS = {"8b": [32, 8, 128, GROWN_RANK]}
RESULT = ROOT / "benchmarks" / "results" / "vs-weights.json"
GIB = 1024**3
BLOCK_TOKENS = 16  # of vLLM's KV cache
NO_BUDGET_S = 1e6
# The trainer besides its weights: adapters, what merging takes, base weights to compare with; and up to 44 GB that the
# weight transfer of vLLM 0.26 leaves reserved (vllm#52950). Where a server stood in its way, a sync did not return.
TRAINER_ROOM_BYTES = 52 * GIB
# 32B twice, for fused serving, leaves no more of an H200.
MOST_KV_BYTES = {"32b": 9 * GIB}
TINY: dict[str, Any] = {
    "shapes": ["tiny"], "ranks": [8], "warmup": 1, "repeats": 2, "concurrency": [2, 4], "prompt_tokens": 16,
    "new_tokens": 8, "decode_repeats": 1, "drift_syncs": 3, "completions": 8, "completion_tokens": 8, "steps": 1,
    "fleet": [1],
}  # fmt: skip


def main() -> None:
    args = parse_args()
    results = Results(args.out)
    failed = False
    if not args.show:
        # A run that is ended leaves its `with` blocks, and so stops its servers, on an exception only.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        failed = run(args, results)
    print(table.text(results.all))
    if args.plot:
        args.out.with_suffix(".svg").write_text(table.chart(results.all))
    if args.page:
        page.write()
    sys.exit(failed)


def run(args: argparse.Namespace, results: Results) -> bool:
    """Measure what the arguments select and the file lacks. Returns whether something went wrong."""
    clock = Clock(args.budget_s)  # before the imports, which take a while
    args.vllm_version = vllm_version(args.server_python)
    os.environ["OMP_NUM_THREADS"] = "1"  # on hosts of many cores, short operations wait for their threads
    from versus.servers import ServerPool, gpus_here

    gpus = {} if args.tiny else gpus_here(args.work)
    # Before anything touches CUDA: the trainer would spread its model over all GPUs that it sees.
    os.environ["CUDA_VISIBLE_DEVICES"] = str(next(iter(gpus), ""))
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "VLLM_HOST_IP": "127.0.0.1"}
    import torch
    from transformers.utils import logging as transformers_logging
    from versus.shapes import model_bytes

    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    trouble = False
    with clock.at_most(NO_BUDGET_S), work_folder(args) as work:
        for shape in args.shapes:
            room = model_bytes(shape) + TRAINER_ROOM_BYTES
            with ServerPool(gpus, room, args.server_python, work, clock, keep=args.keep) as pool:
                comparison = Comparison(shape, args, work, pool, len(gpus), clock, results)
                try:
                    comparison.run()
                except OutOfTimeError as error:
                    clock.say(f"stopped: {error}")
                    break
                finally:
                    trouble |= bool(comparison.failed)
    return trouble


@dataclass(frozen=True)
class Group:
    """Arms whose servers stand side by side."""

    arms: tuple[str, ...]
    servers: dict[str, Any]


class Comparison:
    """All that is measured of one shape.

    Attributes:
        failed: the errors of failed arms and servers.
    """

    def __init__(
        self, shape: str, args: argparse.Namespace, work: Path, pool: Any, gpus: int, clock: Clock, results: Results
    ) -> None:
        from versus.shapes import config_of

        self.shape = shape
        self.args = args
        self.work = work
        self.pool = pool
        self.clock = clock
        self.results = results
        self.device = "cuda" if gpus else "cpu"
        self.failed: dict[str, str] = {}
        self.folder = work / f"qwen3-{shape}"
        self.ranks = args.ranks or USUAL_RANKS.get(shape, [32, 8, 128])
        self.decode_ranks = args.decode_ranks or [rank for rank in self.ranks if rank != GROWN_RANK]
        self.wanted = args.phases or USUAL_PHASES[shape]
        self.kept_arms: dict[str, Any] = {}
        config = config_of(shape)
        # Keys and values of every layer, for the largest load.
        token_bytes = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
        tokens = max(args.concurrency) * (args.prompt_tokens + args.new_tokens + BLOCK_TOKENS)
        if "steps" in self.wanted:
            tokens = max(tokens, args.completions * (STEP_PROMPT_TOKENS + args.completion_tokens + BLOCK_TOKENS))
        self.kv_bytes = min(tokens * token_bytes, MOST_KV_BYTES.get(shape, sys.maxsize))
        reasons = {name: why_left_out(name, self.device, gpus, args.tensor_parallel) for name in args.arms}
        left_out = {name: why for name, why in reasons.items() if why}
        self.arms = tuple(name for name in args.arms if name not in left_out)
        results.put(left_out, "shapes", shape, "left_out")
        for name, why in left_out.items():
            clock.say(f"{name} is left out: {why}")

    def run(self) -> None:
        from versus.servers import gpu_names
        from versus.shapes import parameters_of, write_model
        from versus.workbench import Workbench

        clock, args = self.clock, self.args
        clock.say(f"writing the model of shape {self.shape}")
        write_model(self.folder, self.shape, self.device)
        # All that will be needed, first things first.
        groups = [(rank, group) for rank in self.ranks for group in self.groups(rank)]
        specs = [spec for rank, group in groups for spec in self.needed(rank, group)]
        fleets = self.fleets(self.ranks[0])
        specs += [spec for fleet in fleets.values() for spec in fleet]
        self.pool.start_what_fits(list(dict.fromkeys(specs)))
        clock.say("loading the trainer's model")
        self.bench = Workbench(self.folder, self.device)
        self.pool.settle()  # nothing is measured while servers start
        self.results.put(parameters_of(self.shape), "shapes", self.shape, "parameters")
        self.results.put(self.kv_bytes, "shapes", self.shape, "kv_cache_bytes")
        self.results.add_run(described(args, gpu_names() if self.device == "cuda" else []))
        try:
            for rank, group in self.in_turn(groups):
                self.bench.use_rank(rank)
                self.measure(rank, group, [phase for phase in self.phases(rank) if phase != "steps"])
            first = self.ranks[0]
            if "steps" in self.wanted:
                self.bench.use_rank(first)
                for group in [one for rank, one in groups if rank == first]:
                    if self.needed(first, group):
                        self.pool.clear_trainer(keep=list(group.servers.values()))
                        self.measure(first, group, ["steps"])
            if fleets:
                self.bench.use_rank(first)
                self.measure_fleets(first, fleets)
        finally:
            self.close_kept_arms()

    # Servers

    def servers(self, rank: int) -> dict[str, Any]:
        """The server of each arm; a server that applies adapters to each token reserves this very rank."""
        return {name: self.server(server_kind(name), rank, server_number(name)) for name in self.arms}

    def server(self, kind: str, rank: int, number: int = 0) -> Any:
        from versus.servers import ServerSpec

        decodes = kind != "runtime" or rank in self.decode_ranks or "steps" in self.phases(rank)
        return ServerSpec(
            kind=kind,
            shape=self.shape,
            model=self.folder,
            lora_rank=rank if kind == "runtime" else 0,
            kv_bytes=self.kv_bytes if decodes and not number else min(self.kv_bytes, GIB),
            number=number,
            workers=self.args.tensor_parallel,
            is_eager=self.args.enforce_eager,
        )

    def groups(self, rank: int) -> list[Group]:
        """The arms by what can stand side by side; an arm whose server has no room is noted as failed."""
        of_arm = self.servers(rank)
        for name, server in of_arm.items():
            if not self.pool.has_room(server):
                gib = server.memory_bytes() / GIB
                self.note_failure(rank, name, f"{server.name} needs about {gib:.0f} GiB, and no GPU has that")
        groups = self.pool.groups(list(dict.fromkeys(of_arm.values())))
        return [
            Group(
                tuple(name for name in self.arms if of_arm[name] in group),
                {n: s for n, s in of_arm.items() if s in group},
            )
            for group in groups
        ]

    def in_turn(self, groups: Sequence[tuple[int, Group]]) -> Iterator[tuple[int, Group]]:
        """Ranks and groups of arms; those whose servers run go first, as others would take their place."""
        waiting = list(groups)
        while waiting:
            ready = (one for one in waiting if self.pool.runs(list(one[1].servers.values())))
            turn = next(ready, waiting[0])
            waiting.remove(turn)
            yield turn

    # Measuring

    def measure(self, rank: int, group: Group, phases: Sequence[str]) -> None:
        """Some phases at one rank, with the servers of one group."""
        from versus.measure import Turns

        phases = [phase for phase in phases if not self.is_measured(rank, phase, group)]
        if not phases:
            return
        earlier = self.results.get(*self.place(rank), "failed")
        for name in (*group.arms, *phases):
            earlier.pop(name, None)
        arms = self.connect(rank, group)
        if not arms:
            return
        turns = Turns(arms, self.clock)
        try:
            for phase in phases:
                self.clock.say(f"{self.shape}, rank {rank}: {phase} of {', '.join(arm.name for arm in turns.arms)}")
                try:
                    self.measure_phase(phase, rank, group, turns)
                except OutOfTimeError:
                    raise
                except Exception as error:  # what can still be measured is
                    traceback.print_exc()
                    self.note_failure(rank, phase, f"{type(error).__name__}: {error}"[:2000])
                    continue
                for arm in turns.arms:
                    if arm.name not in turns.failed:
                        self.results.put(True, *self.place(rank), "complete", phase, arm.name)
        finally:
            for name, words in turns.failed.items():
                self.note_failure(rank, name, words)
            for arm in arms:
                if arm not in self.kept_arms.values():
                    with contextlib.suppress(Exception):  # an error at the end changes no number
                        arm.close()

    def connect(self, rank: int, group: Group) -> list[Any]:
        """The arms of a group, except arms that fail to connect."""
        from versus.arms import make_arm
        from versus.servers import ServerTroubleError

        arms = []
        self.close_kept_arms(keep=list(group.servers.values()))
        self.pool.start(list(dict.fromkeys(group.servers.values())))
        for name in group.arms:
            server = group.servers[name]
            try:
                self.pool.wait(server)
                url = self.pool.url(server)
                if name == "weights" and url in self.kept_arms:  # its NCCL group is for the trainer's lifetime
                    self.kept_arms[url].use(self.bench.model)
                    arms.append(self.kept_arms[url])
                    continue
                arms.append(make_arm(name, self.bench, server, [url], self.work))
                if name == "weights":
                    self.kept_arms[url] = arms[-1]
            except OutOfTimeError:
                raise
            except Exception as error:
                kind = "server" if isinstance(error, ServerTroubleError) else "arm"
                self.note_failure(rank, name, f"{kind}: {error}"[:2000])
        return arms

    def close_kept_arms(self, keep: Sequence[Any] = ()) -> None:
        """Close the arms of servers not in `keep`, before these servers stop: NCCL waits for a peer that is gone."""
        for url, arm in list(self.kept_arms.items()):
            if arm.server not in keep:
                self.kept_arms.pop(url).close()

    def measure_phase(self, phase: str, rank: int, group: Group, turns: Any) -> None:
        from versus.measure import Load, Turns, measure_decoding, measure_drift, measure_syncs
        from versus.profile import measure_profiles
        from versus.steps import Batch, measure_steps

        args, clock, bench = self.args, self.clock, self.bench
        save = self.saver(rank, phase, group)
        if phase == "sync":
            measure_syncs(turns, bench, args.warmup, args.repeats, save)
            self.keep_memory(rank, group, turns)
        elif phase == "decode":
            decoding = Turns([arm for arm in turns.arms if arm.name not in SERVED_AS_RUNTIME], clock)
            load = Load(
                concurrency=tuple(args.concurrency),
                prompt_tokens=args.prompt_tokens,
                new_tokens=args.new_tokens,
                repeats=args.decode_repeats,
            )
            measure_decoding(decoding, bench, load, clock, save)
            turns.failed |= decoding.failed
        elif phase == "drift":
            measure_drift(turns, bench, args.drift_syncs, clock, save)
        elif phase == "profile":
            measure_profiles(turns, bench, args.repeats, self.work, save)
        elif phase == "steps":
            batch = Batch(completions=args.completions, tokens=args.completion_tokens, micro_batch=args.micro_batch)
            arms = [arm for arm in turns.arms if arm.name not in SERVED_AS_RUNTIME]
            measure_steps(arms, bench, batch, args.steps, self.work, clock, save)

    def fleets(self, rank: int) -> dict[str, list[Any]]:
        """The servers of each arm of ours whose fleet is still to be measured."""
        if "fleet" not in self.wanted:
            return {}
        return {
            name: [self.server(name, rank, number) for number in range(max(self.args.fleet))]
            for name in OURS
            if name in self.arms and (self.args.again or not self.results.get("shapes", self.shape, "fleet", name))
        }

    def measure_fleets(self, rank: int, fleets: dict[str, list[Any]]) -> None:
        from versus.arms import make_arm
        from versus.measure import measure_fleets

        self.close_kept_arms()
        self.pool.start_what_fits([server for servers in fleets.values() for server in servers])
        self.pool.settle()
        for name, servers in fleets.items():
            self.results.get(*self.place(rank), "failed").pop(f"fleet of {name}", None)
            try:
                self.pool.start(servers)
                for server in servers:
                    self.pool.wait(server)
                urls = [self.pool.url(server) for server in servers]
                found = measure_fleets(
                    lambda count, name=name, urls=urls, server=servers[0]: make_arm(
                        name, self.bench, server, urls[:count], self.work
                    ),
                    self.args.fleet,
                    self.bench,
                    self.args.warmup,
                    self.args.repeats,
                    self.clock,
                )
                self.results.put({"lora_rank": rank, **found}, "shapes", self.shape, "fleet", name)
            except OutOfTimeError:
                raise
            except Exception as error:
                self.note_failure(rank, f"fleet of {name}", str(error)[:2000])

    def phases(self, rank: int) -> list[str]:
        """The phases measured at this rank; some are measured at the first rank only."""
        first = rank == self.ranks[0]
        wanted = {"sync": True, "decode": rank in self.decode_ranks, "drift": first, "profile": first, "steps": first}
        return [phase for phase, is_wanted in wanted.items() if is_wanted and phase in self.wanted]

    def keep_memory(self, rank: int, group: Group, turns: Any) -> None:
        """What each server has taken by now, and where it is."""
        for arm in turns.arms:
            server = group.servers[arm.name]
            self.results.put(self.pool.memory(server), *self.place(rank), "server_memory", arm.name)

    # The file

    def place(self, rank: int) -> tuple[str, ...]:
        return ("shapes", self.shape, "ranks", str(rank))

    def needed(self, rank: int, group: Group) -> list[Any]:
        """The servers of a group with which something is still to be measured."""
        is_done = all(self.is_measured(rank, phase, group) for phase in self.phases(rank))
        return [] if is_done else list(group.servers.values())

    def is_measured(self, rank: int, phase: str, group: Group) -> bool:
        """Whether all arms have been through it; otherwise all of them go again, to take turns."""
        complete = self.results.get(*self.place(rank), "complete", phase)
        return all(arm in complete for arm in group.arms) and not self.args.again

    def saver(self, rank: int, phase: str, group: Group) -> Any:
        def save(found: dict[str, Any]) -> None:
            for name, value in found.items():
                self.results.put(value | {"beside": list(group.arms)}, *self.place(rank), phase, name)

        return save

    def note_failure(self, rank: int, name: str, words: str) -> None:
        self.failed[name] = words
        print(f"{name}: {words}", file=sys.stderr, flush=True)
        self.results.put(words.replace(str(self.work), "WORK"), *self.place(rank), "failed", name)


def vllm_version(python: Path) -> str:
    from trl_lora_sync.cli.console import UsageError
    from trl_lora_sync.cli.installed import find_engine

    try:
        return find_engine("vllm", python, option="--server-python").version
    except UsageError as error:
        raise SystemExit(str(error)) from error


def described(args: argparse.Namespace, gpus: Sequence[str]) -> dict[str, Any]:
    """The facts needed to judge or repeat the run; no paths of the machine."""
    from run_environment import run_environment

    return run_environment("vllm", args.vllm_version) | {"command": command_line(PLACES), "gpus": list(gpus)}


@contextlib.contextmanager
def work_folder(args: argparse.Namespace) -> Any:
    """Where models, logs and the list of kept servers are: the folder given, or a temporary one."""
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
        yield args.work.resolve()
        return
    if args.keep:
        raise SystemExit("--keep needs --work DIR, in which the next run finds the servers and their models.")
    from versus.shapes import model_bytes

    needed = max(model_bytes(shape) for shape in args.shapes)
    memory = Path("/dev/shm")
    in_memory = memory.is_dir() and shutil.disk_usage(memory).free > 1.5 * needed + GIB
    with tempfile.TemporaryDirectory(prefix="vs-weights-", dir=memory if in_memory else None) as folder:
        yield Path(folder)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--shapes", nargs="+", choices=["tiny", "0.6b", "8b", "32b"], default=["0.6b", "8b", "32b"])
    add("--ranks", type=int, nargs="+", help="of the adapter (default: 32 8 128; at 8b 256 as well, without decoding)")
    add("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    add("--phases", nargs="+", choices=PHASES, help="(default: by shape); most at the first rank only")
    add("--warmup", type=int, default=2, help="syncs of each arm before the measured ones (default: 2)")
    add("--repeats", type=int, default=9, help="syncs of each arm that count (default: 9)")
    add("--decode-ranks", type=int, nargs="+", help="ranks at which decoding is measured (default: all up to 128)")
    add("--concurrency", type=int, nargs="+", default=[32, 256], help="requests at once (default: 32 256)")
    add("--prompt-tokens", type=int, default=128, help="(default: 128)")
    add("--new-tokens", type=int, default=128, help="of each request (default: 128)")
    add("--decode-repeats", type=int, default=3, help="measured rounds of each load (default: 3)")
    add("--drift-syncs", type=int, default=50, help="(default: 50)")
    add("--completions", type=int, default=256, help="of a GRPO step (default: 256)")
    add("--completion-tokens", type=int, default=256, help="of each completion of a GRPO step (default: 256)")
    add("--micro-batch", type=int, default=8, help="completions that the trainer computes at once (default: 8)")
    add("--steps", type=int, default=3, help="GRPO steps of each arm that count, after one warm-up step (default: 3)")
    add("--fleet", type=int, nargs="+", default=[1, 2, 3, 4], help="numbers of servers (default: 1 2 3 4)")
    add("--tensor-parallel", type=int, default=1, help="workers of each server, each on another GPU (default: 1)")
    add("--enforce-eager", action="store_true", help="servers compile nothing, and start sooner and decode more slowly")
    add("--budget-s", type=float, default=NO_BUDGET_S, help="stop in good time before so many seconds have passed")
    add("--again", action="store_true", help="measure also what the file has already")
    add("--keep", action="store_true", help="leave the servers running for a further run with the same --work")
    add("--work", type=Path, help="folder for models and logs (default: a temporary one)")
    add(
        "--server-python",
        type=Path,
        help=f"interpreter with vLLM (default: ${PYTHON_VARIABLE}, else .venv-vllm of the checkout, else this one)",
    )
    add("--out", type=Path, help=f"the JSON file, to which is added (default: {RESULT.relative_to(ROOT)})")
    add("--tiny", action="store_true", help="a tiny model on the CPU, everything once")
    add("--show", action="store_true", help="measure nothing")
    add("--plot", action="store_true", help="write a chart beside the JSON file")
    add("--page", action="store_true", help="write docs/benchmarks.md, its chart and the headline of the README")
    args = parser.parse_args()
    if args.tiny:
        vars(args).update(TINY)
        args.out = args.out or Path("vs-weights-tiny.json")
    args.out = args.out or RESULT
    own = DEFAULT_PYTHON if DEFAULT_PYTHON.exists() else sys.executable
    args.server_python = args.server_python or Path(os.environ.get(PYTHON_VARIABLE) or own)
    return args


if __name__ == "__main__":
    main()
