"""Live tier: a real vLLM whose workers write versions into their slots, and read other adapters with several threads.

Both from the second one of a kind on.
"""

import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from contract.reference import PeftReference
from contract.served import soon
from safetensors.torch import load_file, save_file
from support.adapters import make_foreign
from support.gpu_stand_in import StandInGPU, StandInProcess
from support.policies import token_ids
from support.processes import run_script
from support.servers import damage
from support.shared_memory import shared_folder, use_pinned_files, written_damaged
from support.trainers import grpo_trainer, steps_of, wait_for_unloads
from versus.scoring import prompt_logprobs
from vllm_server import VLLMServer

from trl_lora_sync import GRPOTrainer
from trl_lora_sync.adapter.canonical import CanonicalAdapter
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore, StoredAdapter
from trl_lora_sync.engine_plugins import vllm_quick_load
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.errors import AdapterNotVisibleError, AdapterRejectedError, ServerSetupError
from trl_lora_sync.runtime import Blocking

ROOT = Path(__file__).parents[2]
PROMPT = token_ids(3, 24)
FILE = "adapter_model.safetensors"


class Quick:
    """A server, an engine that is connected to it, and the truth about its base model."""

    def __init__(self, server: VLLMServer, reference: PeftReference, folder: Path) -> None:
        self.server, self.reference = server, reference
        self.store = AdapterStore(folder / "store", pinned=PinnedFilePool())
        self.engine = Blocking(VLLMEngine(server.base_url, is_local=True))
        self.engine.connect(soon(60))
        self._versions = 0

    def write(self, seed: int, dtype: torch.dtype = torch.bfloat16, rank: int = 8) -> StoredAdapter:
        self._versions += 1
        stored = self.store.write(self._versions, self.reference.adapter(seed, rank=rank))
        assert stored.path
        tensors = load_file(stored.path / FILE)
        save_file({name: tensor.to(dtype) for name, tensor in tensors.items()}, stored.path / FILE)
        make_foreign(stored.path)
        return stored

    def write_flat(self, seed: int, rank: int = 8) -> StoredAdapter:
        """As a trainer does."""
        self._versions += 1
        return self.store.write(self._versions, flat(self.reference.adapter(seed, rank=rank)))

    def send(self, stored: StoredAdapter) -> httpx.Response:
        """A load as any client makes it."""
        body = {"lora_name": stored.name, "lora_path": stored.server_path}
        return httpx.post(f"{self.server.base_url}/v1/load_lora_adapter", json=body, timeout=60, trust_env=False)

    def publish(self, seed: int, rank: int = 8) -> StoredAdapter:
        stored = self.write_flat(seed, rank)
        self.engine.load(stored, soon(60))
        return stored

    def publish_reserved(self, seed: int, after: StoredAdapter) -> StoredAdapter:
        """As a run does with two versions or more."""
        coming = self.store.after(after, self._versions + 1)
        assert coming is not None
        self.engine.reserve(coming, soon(60))
        assert coming.name not in self.engine.loaded(soon())
        return self.publish(seed)

    def counts(self) -> dict[str, int]:
        """How versions came, in the first worker; the same in all of them."""
        asked = {"method": "lora_sync_slot_counts"}
        answer = httpx.post(f"{self.server.base_url}/collective_rpc", json=asked, timeout=60, trust_env=False)
        first, *others = answer.json()["results"]
        assert all(one == first for one in others), answer.json()["results"]
        return Counter(first)

    def load(self, seed: int, dtype: torch.dtype = torch.bfloat16, rank: int = 8) -> str:
        stored = self.write(seed, dtype, rank)
        self.engine.load(stored, soon(60))
        return stored.name

    def is_policy(self, name: str, seed: int) -> bool:
        """By one request; `score` makes one per token."""
        return self.is_of_policy(prompt_logprobs(self.engine, name, PROMPT, soon(60)), seed)

    def score(self, name: str) -> list[float]:
        return self.engine.score(name, PROMPT, soon(60))

    def is_of_policy(self, found: list[float], seed: int) -> bool:
        def gap(seed: int | None) -> float:
            adapter = None if seed is None else self.reference.adapter(seed)
            expected = self.reference.logprobs(adapter, PROMPT[:1], PROMPT[1:])
            return sum(abs(one - other) for one, other in zip(found, expected, strict=True)) / len(expected)

        return gap(seed) < 2 * self.reference.tolerance < gap(None)

    def close(self) -> None:
        for name in self.engine.loaded(soon()):
            self.engine.unload(name, soon(60))
        self.engine.close()
        self.store.close()


@pytest.fixture(scope="module")
def reference(base_model: Path) -> PeftReference:
    return PeftReference(base_model)


def server_of(base_model: Path, log_path: Path, *extra_args: str) -> VLLMServer:
    return VLLMServer(
        base_model,
        extra_args=[
            *("--worker-extension-cls", vllm_quick_load.WORKER),
            *("--middleware", vllm_quick_load.MIDDLEWARE),
            *extra_args,
        ],
        extra_env={"PYTHONPATH": str(ROOT)},
        dev_mode=True,  # for the request that reads the workers' counts
        log_path=log_path,
    )


@pytest.fixture(scope="module")
def quick_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    with server_of(base_model, tmp_path_factory.mktemp("server") / "quick.log") as server:
        yield server


@pytest.fixture
def quick(quick_server: VLLMServer, reference: PeftReference) -> Iterator[Quick]:
    with shared_folder() as folder, contextlib.closing(Quick(quick_server, reference, folder)) as quick:
        yield quick


def flat(adapter: CanonicalAdapter) -> CanonicalAdapter:
    return replace(adapter, flat=adapter.flat.bfloat16())


def holds_open(server: VLLMServer, folder: Path) -> bool:
    """Whether a process of the server has a file below `folder` in its memory, as after vLLM's own way on a CPU."""
    process, maps = psutil.Process(server.pid), ""
    for one in (process, *process.children(recursive=True)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # helpers come and go
            maps += Path(f"/proc/{one.pid}/maps").read_text()
    return str(folder) in maps


def test_each_version_is_what_was_exported_and_in_memory_of_the_server(quick: Quick) -> None:
    first = quick.load(1)
    assert quick.is_policy(first, 1)
    for seed in (2, 3, 4):
        stored = quick.write(seed)
        assert stored.path
        quick.engine.load(stored, soon(60))
        assert not holds_open(quick.server, stored.path)
        shutil.rmtree(stored.path)
        assert quick.is_policy(stored.name, seed)
        assert quick.engine.unload(stored.name, soon(60))
    assert quick.is_policy(first, 1)


def test_the_same_adapter_gives_the_same_numbers_both_ways(quick: Quick) -> None:
    """Another rank than the other tests have, so that the first one is left to vLLM, which maps the file here."""
    versions = [quick.write(5, rank=4) for _ in range(3)]
    scores = []
    for stored in versions:
        quick.engine.load(stored, soon(60))
        scores.append(prompt_logprobs(quick.engine, stored.name, PROMPT, soon(60)))
    assert [holds_open(quick.server, stored.path) for stored in versions if stored.path] == [True, False, False]
    assert scores[0] == scores[1] == scores[2]


def test_other_dtypes_and_ranks_in_between_are_served_as_ever(quick: Quick) -> None:
    for seed, dtype, rank in [(1, torch.bfloat16, 8), (2, torch.float32, 8), (3, torch.bfloat16, 16)] * 2:
        name = quick.load(seed, dtype, rank)
        score = quick.engine.score(name, PROMPT, soon(60))
        expected = quick.reference.logprobs(quick.reference.adapter(seed, rank=rank), PROMPT[:1], PROMPT[1:])
        gap = sum(abs(one - other) for one, other in zip(score, expected, strict=True)) / len(expected)
        assert gap < 2 * quick.reference.tolerance
        quick.engine.unload(name, soon(60))


def test_an_adapter_that_cannot_be_read_is_refused_and_the_others_stay(quick: Quick) -> None:
    names = [quick.load(seed) for seed in (1, 2)]
    stored = quick.write(3)
    assert stored.path
    damage(stored.path)
    with pytest.raises(AdapterRejectedError):
        quick.engine.load(stored, soon(60))
    assert quick.engine.loaded(soon()).keys() == set(names)
    assert all(quick.is_policy(name, seed) for seed, name in enumerate(names, 1))


def test_a_run_trains_on_what_it_serves(
    quick: Quick, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exported as on a GPU, with a buffer and page-locked files, both of which work without one.

    The base is in float32, TRL's default, and the adapter is written as the server keeps it, or no slot could be.
    """
    use_pinned_files(monkeypatch)
    before = quick.counts()
    with shared_folder() as folder:
        # With a slot to spare between two syncs.
        settings = {"lora_sync_dir": str(folder), "lora_sync_keep": 1}
        trainer = grpo_trainer(quick.server.base_url, base_model, tmp_path, max_steps=6, **settings)
        assert next(trainer.model.parameters()).dtype == torch.float32
        trainer.train()
        after = quick.counts()
        assert after["written"] - before["written"] >= 2  # the others went to slots that another kind had
        assert after["reserved"] - before["reserved"] >= 1
        check_and_close(trainer)


def check_and_close(trainer: GRPOTrainer) -> None:
    steps = steps_of(trainer)
    assert all(step["sampling/sampling_logp_difference/mean"] < 0.015 for step in steps)
    assert steps[-1]["lora_sync/verified"] == 1
    wait_for_unloads(trainer)
    trainer.vllm_generation.close()


def test_the_log_says_that_adapters_are_read_so(quick: Quick) -> None:
    assert "written into their slots directly, and other adapters are read" in quick.server.log_path.read_text()
    assert httpx.get(f"{quick.server.base_url}/health", timeout=10, trust_env=False).status_code == 200


# Versions of a trainer


def test_versions_are_written_into_their_slots_and_late_requests_get_their_own(quick: Quick) -> None:
    """The server has two slots, so a version requested again has lost its slot twice by then."""
    base = quick.engine.score(quick.engine.capabilities.base_model, PROMPT, soon(60))
    for seed in (8, 9):
        quick.publish(seed)  # into both slots, which adapters of other tests may have had
    before = quick.counts()
    versions = [(seed, quick.publish(seed).name) for seed in (1, 2, 3, 4)]
    assert all(quick.is_policy(name, seed) for seed, name in (*reversed(versions), *versions))
    came = quick.counts()
    came.subtract(before)
    assert came["written"] == 4 + 2 + 2
    assert came["loaded by vLLM"] == came["read"] == 0
    # Not to the last bit, as vLLM rounds differently by how many tokens it computes at once.
    assert quick.engine.score(quick.engine.capabilities.base_model, PROMPT, soon(60)) == pytest.approx(base, abs=1e-5)


def test_versions_are_put_into_reserved_slots_and_late_requests_get_their_own(quick: Quick) -> None:
    # Into both slots, which adapters of other tests may have had. One name may be listed then.
    assert quick.engine.unload(quick.publish(8).name, soon(60))
    last = quick.publish(9)
    before = quick.counts()
    versions = [(9, last)]
    for seed in (2, 3, 4, 5):
        last = quick.publish_reserved(seed, last)
        assert quick.is_policy(last.name, seed)
        assert quick.is_policy(versions[-1][1].name, versions[-1][0])
        assert quick.engine.unload(versions[-1][1].name, soon(60))
        versions.append((seed, last))
    came = quick.counts()
    came.subtract(before)
    assert came["reserved"] == 4
    assert came["loaded by vLLM"] == came["read"] == 0


def test_a_reserved_slot_that_another_adapter_needs_is_given_up(quick: Quick) -> None:
    assert quick.engine.unload(quick.publish(8).name, soon(60))
    last = quick.publish(9)
    assert quick.engine.unload(last.name, soon(60))
    before = quick.counts()["reserved"]
    coming = quick.store.after(last, 1000)
    assert coming is not None
    quick.engine.reserve(coming, soon(60))
    assert quick.is_policy(quick.load(6), 6)
    assert quick.is_policy(quick.load(7), 7)
    stored = quick.store.write(1000, flat(quick.reference.adapter(1)))
    quick.engine.load(stored, soon(60))
    assert quick.is_policy(stored.name, 1)
    assert quick.counts()["reserved"] == before
    assert quick.is_policy(quick.load(6), 6)


def test_a_written_version_is_bit_for_bit_what_vllm_loads(quick: Quick) -> None:
    stored = [quick.write_flat(5) for _ in range(3)]
    assert stored[1].path
    make_foreign(stored[1].path)  # so vLLM loads that one
    scores = []
    for one in stored:
        quick.engine.load(one, soon(60))
        scores.append(prompt_logprobs(quick.engine, one.name, PROMPT, soon(60)))
    assert scores[0] == scores[1] == scores[2]


def test_versions_and_other_adapters_run_in_one_batch(quick: Quick) -> None:
    quick.publish(0)
    names = [(6, quick.load(6)), (7, quick.publish(7).name)]
    with ThreadPoolExecutor(8) as pool:
        scoring = [(seed, pool.submit(quick.score, name)) for seed, name in names * 8]
        # While two are sampled from, another one takes a slot of theirs.
        later = quick.publish(8).name
        scoring += [(8, pool.submit(quick.score, later))]
    assert all(quick.is_of_policy(found.result(), seed) for seed, found in scoring)


def test_other_ranks_and_kinds_in_between_leave_nothing_behind(quick: Quick) -> None:
    for seed, rank in enumerate([8, 4, 16, 8, 4, 4, 16, 8], 1):
        name = quick.publish(seed, rank).name
        score = quick.engine.score(name, PROMPT, soon(60))
        expected = quick.reference.logprobs(quick.reference.adapter(seed, rank=rank), PROMPT[:1], PROMPT[1:])
        gap = sum(abs(one - other) for one, other in zip(score, expected, strict=True)) / len(expected)
        assert gap < 2 * quick.reference.tolerance


def test_a_version_that_changed_on_its_way_is_refused_and_the_others_stay(quick: Quick) -> None:
    versions = [(seed, quick.publish(seed).name) for seed in (1, 2)]
    stored = written_damaged(lambda: quick.write_flat(3))
    with pytest.raises(AdapterNotVisibleError, match=r"damaged.*its tensors have the checksum"):
        quick.engine.load(stored, soon(60))
    assert quick.engine.loaded(soon()).keys() == {name for _, name in versions}
    assert all(quick.is_policy(name, seed) for seed, name in versions)
    assert quick.is_policy(quick.publish(4).name, 4)


def test_the_benchmark_of_the_floor_measures_a_running_server(quick: Quick, base_model: Path, tmp_path: Path) -> None:
    out = tmp_path / "floor.json"
    script = [sys.executable, ROOT / "benchmarks" / "floor.py", "--url", quick.server.base_url, "--model", base_model]
    options = ["--cases", "tiny:8", "--rounds", "1", "--tokens", "100", "--peft", "--out", out]
    ended = run_script([*script, *options], tmp_path / "log", 300.0)
    assert ended.code == 0, ended.output
    [case] = json.loads(out.read_text())["cases"]
    assert case["syncs"] >= 50
    assert case["base_is_bit_identical"]
    assert case["served"]["largest_difference_between_ways"] == 0  # as is usual on a CPU
    assert case["served"]["gap_to_peft"] < quick.reference.tolerance < case["served"]["effect"]
    timed = case["syncs_in_turns"]
    assert timed["ms"].keys() == {"ipc", "slots", "files", "vllm"}
    for way in ("ipc", "slots"):  # which are the same on a CPU
        came = Counter(timed["came"][way])
        # Ahead of the request to load, if the worker was not busy.
        assert came["ahead"] + came["mapped"] == came["written"] == 2
        assert came.total() == 4
        assert case["decoding"][way]["syncs"] > 0


def test_a_trainer_knows_that_every_version_is_compared(quick: Quick) -> None:
    assert quick.engine.capabilities.checks_payload


def test_a_server_that_cannot_read_the_gpu_says_so_once_and_waits_for_each_file(
    quick: Quick, reference: PeftReference
) -> None:
    """By a stand-in for the trainer's GPU; this server computes on a CPU."""
    gpu = StandInGPU()
    with shared_folder() as folder, ThreadPoolExecutor(1) as thread:
        pool = PinnedFilePool(driver_for=StandInProcess(gpu), shares_gpu=True)
        store = AdapterStore(folder / "store", pinned=pool)
        log, reason = quick.server.log_path, "this process computes on cpu, not on a GPU"
        assert log is not None
        before = log.read_text().count(reason)
        for seed in (1, 2, 3):
            stored = store.write(seed, flat(reference.adapter(seed)))
            loading = thread.submit(quick.engine.load, stored, soon(60))
            if seed == 1:
                wait_until(lambda: log.read_text().count(reason) > before)
                assert not loading.done()
            store.finish()
            loading.result(60)
            assert quick.is_policy(stored.name, seed)
            assert quick.engine.unload(stored.name, soon(60))
        store.close()
        assert log.read_text().count(reason) == before + 1
        assert not gpu.owners


_TRAINER = """
import sys, signal, time
from pathlib import Path
sys.path[:0] = {path!r}
from live.test_quick_load import flat, PeftReference
from trl_lora_sync.adapter.pinned_files import PinnedFilePool
from trl_lora_sync.adapter.store import AdapterStore
store = AdapterStore(Path(sys.argv[1]), pinned=PinnedFilePool())
stored = store.write(1, flat(PeftReference(sys.argv[2]).adapter(1)))
print(stored.name, stored.path, flush=True)
signal.pause()
"""


def test_nothing_of_a_killed_trainer_stays_in_the_server(quick: Quick, base_model: Path, tmp_path: Path) -> None:
    with shared_folder() as folder:
        source = _TRAINER.format(path=sys.path)
        trainer = subprocess.Popen(
            [sys.executable, "-c", source, folder / "root", base_model], stdout=subprocess.PIPE, text=True
        )
        try:
            assert trainer.stdout
            name, path = trainer.stdout.readline().split()
            stored = replace(quick.publish(1), name=name, path=Path(path), server_path=path)
            quick.engine.load(stored, soon(60))
            assert holds_open(quick.server, folder)
        finally:
            trainer.send_signal(signal.SIGKILL)
            trainer.wait(30)
        wait_until(lambda: not holds_open(quick.server, folder))
        assert quick.is_policy(name, 1)


def wait_until(is_over: Callable[[], bool]) -> None:
    deadline = soon(30)
    while not is_over():
        deadline.remaining_s()
        time.sleep(0.05)


@pytest.fixture(scope="module")
def parallel_server(base_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMServer]:
    args = ("--tensor-parallel-size", "2", "--distributed-executor-backend", "mp")
    with server_of(base_model, tmp_path_factory.mktemp("parallel") / "parallel.log", *args) as server:
        yield server


@pytest.fixture
def parallel(parallel_server: VLLMServer, reference: PeftReference) -> Iterator[Quick]:
    with shared_folder() as folder, contextlib.closing(Quick(parallel_server, reference, folder)) as quick:
        yield quick


def test_tensor_parallel_workers_write_their_parts_and_refuse_together(parallel: Quick) -> None:
    before = parallel.counts()
    versions = [(seed, parallel.publish(seed).name) for seed in (1, 2, 3)]
    assert all(parallel.is_policy(name, seed) for seed, name in versions)  # the first one has lost its slot
    assert parallel.counts()["loaded by vLLM"] == before["loaded by vLLM"]
    stored = written_damaged(lambda: parallel.write_flat(4))
    with pytest.raises(AdapterNotVisibleError, match="damaged"):
        parallel.engine.load(stored, soon(60))
    assert parallel.is_policy(versions[-1][1], 3)
    last = parallel.publish(5)
    assert parallel.is_policy(last.name, 5)
    for name in parallel.engine.loaded(soon()).keys() - {last.name}:
        parallel.engine.unload(name, soon(60))
    for seed in (6, 7):
        newer = parallel.publish_reserved(seed, last)
        assert parallel.is_policy(newer.name, seed)
        parallel.engine.unload(last.name, soon(60))
        last = newer
    assert parallel.counts()["reserved"] - before["reserved"] == 2


def test_each_server_of_a_run_fills_its_slots_by_itself(
    quick: Quick, parallel: Quick, base_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_pinned_files(monkeypatch)
    servers = (quick, parallel)
    before = [one.counts()["reserved"] for one in servers]
    with shared_folder() as folder:
        settings = {"lora_sync_dir": str(folder), "lora_sync_keep": 1}
        urls = ",".join(one.server.base_url for one in servers)
        trainer = grpo_trainer(urls, base_model, tmp_path, max_steps=6, **settings)
        trainer.train()
        assert all(one.counts()["reserved"] - was >= 2 for one, was in zip(servers, before, strict=True))
        check_and_close(trainer)


def test_a_refused_load_leaves_no_answer_of_a_tensor_parallel_worker_behind(parallel: Quick) -> None:
    """Of an adapter of another client, each worker raised.

    vLLM took the second worker's answer for that to the next load, and so on: a damaged version was answered with 200.
    """
    # Of what the engine's client repeats, nothing is seen here.
    stored = (parallel.write(1, rank=32), parallel.write(2), parallel.write_flat(3))
    loaded = [parallel.send(one) for one in stored]
    assert [one.status_code for one in loaded] == [500, 200, 200]
    assert "LoRA rank 32 is greater than max_lora_rank 16" in loaded[0].text
    damaged = parallel.send(written_damaged(lambda: parallel.write_flat(4)))
    assert (damaged.status_code, "damaged" in damaged.text) == (500, True)
    assert parallel.engine.capabilities.max_lora_rank == 16
    assert parallel.is_policy(parallel.publish(5).name, 5)


def test_a_stock_server_that_reports_the_refusal_of_another_adapter_loads_this_one(
    base_model: Path, reference: PeftReference, tmp_path: Path
) -> None:
    args = ["--tensor-parallel-size", "2", "--distributed-executor-backend", "mp"]
    with shared_folder() as folder, VLLMServer(base_model, extra_args=args, log_path=tmp_path / "stock.log") as server:
        quick = Quick(server, reference, folder)
        with pytest.raises(ServerSetupError, match="--max-lora-rank below the adapter's rank 32"):
            quick.publish(1, rank=32)
        assert quick.engine.retries == 0
        assert quick.is_policy(quick.publish(2).name, 2)
        assert quick.engine.retries == 1
        quick.close()
