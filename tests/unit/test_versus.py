"""Unit tier: the parts of `benchmarks/vs_weights.py` that need no server."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import page
import psutil
import pytest
import torch
import vs_weights
from transformers import AutoModelForCausalLM
from trl.generation.vllm_generation import VLLMGeneration
from versus import arms, measure, servers, shapes, table
from versus.clock import Clock, OutOfTimeError
from versus.kinds import why_left_out
from versus.results import Results
from versus.servers import GIB, ServerPool, ServerSpec, ServerTroubleError
from versus.workbench import Workbench

from trl_lora_sync.engines.base import Completion

ROOT = Path(__file__).parents[2]
H200 = 143771 * 1024**2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shapes.write_model(tmp_path_factory.mktemp("models") / "tiny", "tiny", "cpu")


@pytest.fixture
def bench(folder: Path) -> Workbench:
    bench = Workbench(folder, "cpu")
    bench.use_rank(4)
    return bench


# Models


def test_written_model_is_a_whole_checkpoint_that_transformers_loads(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)

    assert sum(parameter.numel() for parameter in model.parameters()) == shapes.parameters_of("tiny")
    assert float(model.model.layers[1].mlp.up_proj.weight.detach().float().std()) == pytest.approx(0.02, rel=0.05)
    assert torch.equal(model.model.norm.weight, torch.ones_like(model.model.norm.weight))


def test_size_of_an_adapter_is_known_without_making_it(bench: Workbench) -> None:
    made = sum(parameter.numel() for name, parameter in bench.model.named_parameters() if "lora_" in name)

    assert shapes.adapter_parameters("tiny", 4) == made


def test_shapes_are_those_of_the_named_models() -> None:
    sizes = {shape: round(shapes.parameters_of(shape) / 1e9, 1) for shape in ("0.6b", "8b", "32b")}

    assert sizes == {"0.6b": 0.6, "8b": 8.2, "32b": 32.8}


# The trainer's side


def test_a_change_of_one_base_weight_is_seen_and_put_right(bench: Workbench) -> None:
    weight = bench.model.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
    before = weight.data.clone()
    weight.data[3, 5] += 0.5

    first, second = bench.base_drift(), bench.base_drift()

    assert not first.is_bit_identical
    assert first.max_abs == pytest.approx(0.5, rel=0.01)
    assert first.changed_share == pytest.approx(1 / shapes.parameters_of("tiny"))
    assert second.is_bit_identical
    assert torch.equal(weight.data, before)


def test_a_model_with_other_weights_than_its_checkpoint_is_not_compared(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = json.loads((bench.folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(bench, "folder", tmp_path)

    with pytest.raises(RuntimeError, match=r"has model\.norm\.weight$"):
        bench.base_drift()


def test_adapter_of_zeros_has_no_effect_and_the_others_have(bench: Workbench) -> None:
    ids = torch.tensor([[1, 2, 3]])
    bench.change_adapter(std=0.0)
    with torch.no_grad():
        without = bench.model(ids).logits
        bench.change_adapter()
        one = bench.model(ids).logits
        bench.change_adapter()
        other = bench.model(ids).logits
        with bench.model.disable_adapter():
            base = bench.model(ids).logits

    assert torch.equal(without, base)
    assert not torch.equal(one, base)
    assert not torch.equal(one, other)


class RecordingClient:
    """Takes what TRL's client would send over NCCL, which cannot run here."""

    model = "base"

    def __init__(self) -> None:
        self.sent: list[dict[str, torch.Tensor]] = []
        self.cache_resets = 0

    def update_named_params(self, metadata: list[tuple[str, str, list[int]]], params: Any) -> None:
        self.sent.append({name: value.clone() for name, value in params})
        assert [name for name, _, _ in metadata] == list(self.sent[-1])

    def reset_prefix_cache(self) -> None:
        self.cache_resets += 1


@pytest.mark.outside
def test_weights_arm_is_trls_own_sync_whose_parts_and_drift_are_seen(
    bench: Workbench, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = RecordingClient()
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: setattr(self, "vllm_client", client))
    monkeypatch.setattr(arms, "connect_plain", lambda url: None)
    spec = ServerSpec(kind="weights", shape="tiny", model=folder)
    arm = arms.WeightsArm(bench, spec, "http://127.0.0.1:1")

    arm.sync()
    split = arm.split()
    for _ in range(3):
        bench.change_adapter()
        arm.sync()

    assert len(client.sent) == client.cache_resets == 5
    assert split.gather_s > 0
    assert split.load_s > 0
    assert split.payload_bytes == shapes.model_bytes("tiny")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(client.sent[0][name], client.sent[-1][name])  # merged, with other adapters
    assert not bench.base_drift().is_bit_identical  # bfloat16 does not give back what was added to it


def test_decoding_is_measured_with_a_version_active_that_the_arm_has_just_brought(bench: Workbench) -> None:
    seen: list[str] = []

    class Arm:
        name = "runtime"

        def sync(self) -> None:
            seen.append("sync")

        def sample(self, groups: Any, sampling: Any) -> list[list[Completion]]:
            seen.append(f"{len(groups)} at once")
            answer = Completion(prompt_ids=[], token_ids=[1, 2], logprobs=None, logprob_token_ids=None)
            return [[answer] for _ in groups]

    arm: Any = Arm()
    load = measure.Load(concurrency=(2, 3), prompt_tokens=4, new_tokens=2, repeats=1)
    found: dict[str, Any] = {}
    clock = Clock(60)

    measure.measure_decoding(measure.Turns([arm], clock), bench, load, clock, found.update)

    assert seen == ["sync", "2 at once", "2 at once", "3 at once", "3 at once"]
    assert [len(found["runtime"][at_once]["samples"]) for at_once in ("2", "3")] == [1, 1]


# Where servers go


def specs(shape: str, kinds: dict[str, int], workers: int = 1) -> list[ServerSpec]:
    return [
        ServerSpec(kind=kind, shape=shape, model=Path("model"), lora_rank=rank, kv_bytes=9 * GIB, workers=workers)
        for kind, rank in kinds.items()
    ]


def pool(gpus: int, shape: str, tmp_path: Path) -> ServerPool:
    room = shapes.model_bytes(shape) + vs_weights.TRAINER_ROOM_BYTES
    sizes = dict.fromkeys(range(gpus), H200)
    return ServerPool(sizes, room, Path(sys.executable), tmp_path, Clock(60), keep=False)


ALL = {"weights": 0, "runtime": 32, "fused": 0}


@pytest.mark.parametrize(
    ("gpus", "shape", "expected"),
    [
        (2, "8b", [["weights", "runtime", "fused"]]),
        (2, "32b", [["weights"], ["runtime"], ["fused"]]),
        (4, "32b", [["weights", "runtime", "fused"]]),
        (0, "32b", [["weights", "runtime", "fused"]]),  # a CPU's memory is not counted
        (1, "0.6b", [["runtime", "fused"]]),  # NCCL wants a GPU per process
    ],
)
def test_servers_stand_side_by_side_where_the_gpus_have_room(
    gpus: int, shape: str, expected: list[list[str]], tmp_path: Path
) -> None:
    groups = pool(gpus, shape, tmp_path).groups(specs(shape, ALL))

    assert [[spec.kind for spec in group] for group in groups] == expected


def test_server_that_runs_serves_all_its_ranks_before_another_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = ["vs_weights.py", "--ranks", "8", "128", "--decode-ranks", "128", "--phases", "sync", "decode"]
    asked += ["--arms", "weights", "async trainer", "runtime", "fused"]
    monkeypatch.setattr(sys, "argv", [*asked, "--out", str(tmp_path / "found.json")])
    args = vs_weights.parse_args()
    two = pool(2, "32b", tmp_path)
    running: list[ServerSpec] = []
    monkeypatch.setattr(two, "runs", lambda specs: all(spec in running for spec in specs))
    comparison = vs_weights.Comparison("32b", args, tmp_path, two, 2, Clock(60), Results(args.out))
    groups = [(rank, group) for rank in (8, 128) for group in comparison.groups(rank)]

    turns = []
    for rank, group in comparison.in_turn(groups):
        turns.append((rank, group.arms))
        running[:] = group.servers.values()

    assert turns == [
        (8, ("weights",)),
        (128, ("weights",)),
        (8, ("async trainer", "runtime")),
        (8, ("fused",)),
        (128, ("fused",)),
        (128, ("async trainer", "runtime")),
    ]


# The servers' processes

STAND_IN = """
import http.server, sys, time
from pathlib import Path
kind, port, log = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
log.open("a").write("x")
if kind == "weights":
    time.sleep(600)
if kind == "fused":
    sys.exit("no room")
class Healthy(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def log_message(self, *args):
        pass
http.server.HTTPServer(("127.0.0.1", port), Healthy).serve_forever()
"""


@pytest.fixture
def stand_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of vLLM: "weights" is still starting, "fused" does not come up, "runtime" answers."""

    def command(spec: ServerSpec, port: int, python: Path, *, on_cpu: bool) -> list[str]:
        return [str(python), "-c", STAND_IN, spec.kind, str(port), str(tmp_path / f"{spec.name}.starts")]

    monkeypatch.setattr(servers, "serve_command", command)


@pytest.mark.outside
@pytest.mark.usefixtures("stand_ins")
def test_kept_servers_are_those_that_answer_and_the_next_run_ends_them(tmp_path: Path) -> None:
    starting, answering = specs("tiny", {"weights": 0, "runtime": 8})
    with ServerPool({}, 0, Path(sys.executable), tmp_path, Clock(60), keep=True) as first:
        first.start([starting, answering])
        first.wait(answering)
        processes = [psutil.Process(first.running[spec.name].pid) for spec in (starting, answering)]
        url = first.url(answering)
    assert not processes[0].is_running()

    with ServerPool({}, 0, Path(sys.executable), tmp_path, Clock(60), keep=False) as second:
        second.start([answering])
        second.wait(answering)
        assert second.url(answering) == url
    psutil.wait_procs(processes[1:], timeout=10)
    assert not processes[1].is_running() or processes[1].status() == psutil.STATUS_ZOMBIE
    assert not (tmp_path / "servers.json").exists()


@pytest.mark.outside
@pytest.mark.usefixtures("stand_ins")
def test_server_that_does_not_come_up_is_tried_once_and_said_each_time(tmp_path: Path) -> None:
    failing, answering = specs("tiny", {"fused": 0, "runtime": 8})
    with ServerPool({}, 0, Path(sys.executable), tmp_path, Clock(60), keep=False) as pool:
        pool.start_what_fits([failing, answering])
        pool.settle()
        for _ in range(2):
            pool.start([failing, answering])
            pool.wait(answering)
            with pytest.raises(ServerTroubleError, match="no room"):
                pool.wait(failing)
    assert (tmp_path / f"{failing.name}.starts").read_text() == "x"


@pytest.mark.outside
@pytest.mark.parametrize(("gpus", "expected"), [(4, {"weights": 2, "runtime": 2}), (2, {"runtime": 2})])
@pytest.mark.usefixtures("stand_ins")
def test_workers_that_share_a_server_have_gpus_apart_from_the_trainer_where_there_are_enough(
    gpus: int, expected: dict[str, int], tmp_path: Path
) -> None:
    wanted = specs("8b", {"weights": 0, "runtime": 32}, workers=2)

    with pool(gpus, "8b", tmp_path) as started:
        started.start_what_fits([one for one in wanted if why_left_out(one.kind, "cuda", gpus, one.workers) is None])
        found = {name.split("-")[0]: server.gpus for name, server in started.running.items()}

    assert {kind: len(set(on)) for kind, on in found.items()} == expected
    assert all((0 in on) == (gpus == 2) for on in found.values())


@pytest.mark.outside
@pytest.mark.usefixtures("stand_ins")
def test_servers_of_a_fleet_have_a_gpu_each_where_there_are_enough(tmp_path: Path) -> None:
    [first] = specs("8b", {"runtime": 32})
    fleet = [replace(first, number=number) for number in range(3)]

    with pool(4, "8b", tmp_path) as started:
        started.start_what_fits([*specs("8b", {"weights": 0}), *fleet])
        found = [started.running[one.name].gpus for one in fleet]

    assert sorted(found) == [[1], [2], [3]]


def test_memory_that_others_use_is_not_counted_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(servers, "_nvidia_smi", lambda query: [["0", "143771", "4"], ["1", "143771", "80000"]])

    assert servers.gpus_here(None) == {0: 143767 * 1024**2, 1: 63771 * 1024**2}
    (tmp_path / "servers.json").write_text("[]")
    assert servers.gpus_here(tmp_path) == {0: H200, 1: H200}


def test_time_that_is_over_ends_a_run() -> None:
    Clock(60).check()
    with pytest.raises(OutOfTimeError, match="the 0 s of this run are over"):
        Clock(0).check()


@pytest.fixture
def benchmarks_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "benchmarks"))


@pytest.mark.outside
@pytest.mark.usefixtures("benchmarks_on_path")
def test_turn_that_hangs_ends_the_process_and_says_where() -> None:
    code = """
import threading
from versus.clock import Clock
clock = Clock(60)
with clock.at_most(50):
    with clock.at_most(40):
        pass
    with clock.at_most(0.2):
        threading.Event().wait(30)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)

    assert ended.returncode == 1
    assert 'File "<string>", line 9' in ended.stderr


@pytest.mark.outside
@pytest.mark.usefixtures("benchmarks_on_path")
def test_turn_that_returns_or_goes_on_leaves_the_process_alone(run_python: Callable[[str], str]) -> None:
    code = """
import time
from versus.clock import Clock
clock = Clock(60)
with clock.at_most(1.5):
    for _ in range(20):
        clock.check()
        time.sleep(0.1)
time.sleep(2)
print("through")
"""
    assert run_python(code) == "through\n"


# Results and tables


def made_results() -> dict[str, Any]:
    """One shape, of which ours needs 10 ms and 1 ms per MB."""
    ranks: dict[str, Any] = {}
    for rank in (8, 32, 128):
        megabytes = rank * 2.0
        ours = {"sync_s": 0.010 + megabytes / 1000, "first_token_s": 0.02, "trainer_rise_bytes": 5e6}
        split = {"gather_s": 0.001, "write_s": 0.002, "load_s": 0.003, "payload_bytes": megabytes * 1e6}
        stock = {"sync_s": 0.4, "first_token_s": 0.02, "trainer_rise_bytes": 9e8}
        ranks[str(rank)] = {
            "sync": {
                "weights": {"median": stock, "split": split | {"payload_bytes": 16e9}},
                "fused": {"median": ours, "split": split},
            },
            "decode": {
                "weights": {"32": {"median": 1000.0}, "beside": ["weights", "fused"]},
                "fused": {"32": {"median": 970.0}, "beside": ["weights", "fused"]},
            },
            "complete": {"sync": {"weights": True, "fused": True}},
        }
    run = {
        "command": "python benchmarks/vs_weights.py", "date": "2026-01-01", "cpu_cores": 2, "gpus": ["NVIDIA H200"] * 2,
        "versions": {"trl": "1.16.0"}, "server": {"engine": "vllm", "version": "0.26.0"},
    }  # fmt: skip
    return {"runs": [run], "shapes": {"8b": {"ranks": ranks, "left_out": {"runtime": "for the test"}}}}


def test_growth_is_the_line_through_the_ranks() -> None:
    grown = table.growth(made_results(), "8b", "fused")

    assert grown is not None
    assert grown.fixed_s == pytest.approx(0.010)
    assert grown.s_per_gb == pytest.approx(1.0)
    assert grown.r_squared == pytest.approx(1.0)
    assert 0 < grown.exponent < 1  # the fixed part makes it better than linear


def test_limits_are_judged_against_trls_own_sync_in_the_same_file() -> None:
    found = {limit.what: limit for limit in table.limits(made_results())}

    assert found["8b r=32 sync, fused"].found == pytest.approx(0.074 / 0.4)
    assert found["8b r=32 sync, fused"].is_reached
    assert found["8b tokens/s at 32, fused"].is_reached is False
    assert found["8b r=32 sync, runtime"].is_reached is None


@pytest.mark.outside
def test_tables_and_chart_show_what_the_file_has() -> None:
    text, chart = table.text(made_results()), table.chart(made_results())

    assert "| 8b | 32 | fused | 64.0 | 1 | 2 | 3 | 74 | 0.18 | 20 |" in text
    assert "| 8b | 32 | fused | 970 (0.97) | 5 |  |" in text
    assert "| 8b | runtime | for the test |" in text
    assert ElementTree.fromstring(chart).tag.endswith("svg")
    assert "MB of the adapter" in chart


def test_summary_has_each_arm_beside_trls_own_sync_in_the_same_run() -> None:
    results, empty = made_results(), made_results()
    results["shapes"]["8b"]["ranks"]["32"]["drift"] = {
        "weights": {"syncs": 50, "trainer_bit_identical": False, "trainer_changed_share": 0.494},
        "fused": {"syncs": 50, "trainer_bit_identical": True, "trainer_changed_share": 0.0},
    }
    empty["shapes"] = {}

    header, _, fused, runtime = table.summary({"fused": results, "runtime": empty}).splitlines()

    assert header.startswith("| LoRA r=32, 8B | sync | TRL's own sync | ratio |")
    assert fused == "| `fused` | 74 ms | 400 ms | 0.18 | 0.97 | none in 50 syncs | 49% in 50 syncs |"
    assert runtime == "| `runtime` |  |  |  |  |  |  |"


def test_sections_of_a_page_are_replaced_and_nothing_else() -> None:
    (first_begin, first_end), (begin, end) = page.markers("first"), page.markers("second")
    text = f"before\n{first_begin}\nold\n{first_end}\nbetween\n{begin}\nold\n{end}\nafter\n"
    sections = {"first": lambda: "new", "second": lambda: "also new"}

    filled = page.fill(text, sections)

    assert filled == f"before\n{first_begin}\nnew\n{first_end}\nbetween\n{begin}\nalso new\n{end}\nafter\n"
    assert page.fill(filled, sections) == filled
    with pytest.raises(ValueError, match="no lines"):
        page.fill((ROOT / "LICENSE").read_text(), sections)


@pytest.mark.parametrize("file", ["docs/benchmarks.md", "README.md"])
def test_documentation_shows_the_results_that_are_kept(file: str) -> None:
    """`python benchmarks/page.py` brings both files up to date."""
    sections = {path.relative_to(ROOT).as_posix(): sections for path, sections in page.pages()}
    text = (ROOT / file).read_text()

    assert set(re.findall("<!-- (.*): begin -->", text)) == sections[file].keys()
    assert page.fill(text, sections[file]) == text


def test_readme_and_page_show_all_tables_of_the_comparison() -> None:
    kept = json.loads(vs_weights.RESULT.read_text())

    assert page.versus_summary() in (ROOT / "README.md").read_text()
    assert page.versus_summary() in page.PAGE.read_text()
    assert table.tables(kept) in page.PAGE.read_text()


def test_every_file_of_results_is_explained_on_the_page() -> None:
    explained = page.how_it_was_run()

    for file in page.RESULTS.glob("*.json"):
        assert f"**{file.name}**: " in explained


def test_page_shows_the_chart_that_the_command_writes() -> None:
    assert f"({page.CHART.relative_to(page.PAGE.parent).as_posix()})" in page.PAGE.read_text()
    text = "".join(ElementTree.parse(page.CHART).getroot().itertext())
    assert all(part in text for part in ("8b r=32", "32b r=32", "runtime", "fused", "MB of the adapter"))


def test_a_further_run_adds_to_the_file(tmp_path: Path) -> None:
    file = tmp_path / "results" / "found.json"
    Results(file).put(1, "shapes", "8b", "parameters")
    later = Results(file)
    later.put(2, "shapes", "32b", "parameters")

    assert later.get("shapes", "8b", "parameters") == 1
    assert later.get("shapes", "8b", "nothing", "yet") == {}
    assert set(json.loads(file.read_text())["shapes"]) == {"8b", "32b"}
    assert [path.name for path in file.parent.iterdir()] == ["found.json"]


def test_kept_command_names_no_place_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["--shapes", "8b", "--work", "/secret", "--out=/secret.json", "--server-python", "/secret", "--keep"]
    monkeypatch.setattr(sys, "argv", ["vs_weights.py", *given])

    assert vs_weights.command_line(vs_weights.PLACES) == "python benchmarks/vs_weights.py --shapes 8b --keep"
