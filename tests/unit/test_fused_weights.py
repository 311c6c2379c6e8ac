"""Unit tier: the arithmetic of fused serving, and what is refused of an adapter's files."""

import errno
import json
import math
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from trl_lora_sync.engine_plugins import fetching, fused_weights
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, read_head
from trl_lora_sync.engine_plugins.fused_placement import WeightSlice
from trl_lora_sync.engine_plugins.fused_weights import (
    FusedAdapter,
    InPlace,
    KnownLaunches,
    Matrices,
    OneLaunch,
    Reader,
    copies_of,
    finite,
    fuse,
)
from trl_lora_sync.engine_plugins.pinned_memory import PinError
from trl_lora_sync.engine_plugins.safetensors_file import CUT_OFF
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM

R, IN, OUT = 2, 8, 16
PREFIX = "base_model.model.layers.0."
Write = Callable[..., Path]


def matrices(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(R, IN, generator=random).to(dtype), torch.randn(OUT, R, generator=random).to(dtype)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes an adapter's folder, with its tensors or configuration changed."""

    def write_folder(tensors: dict[str, Tensor] | None = None, **config: Any) -> Path:
        if tensors is None:
            lora_A, lora_B = matrices()
            tensors = {f"{PREFIX}q_proj.lora_A.weight": lora_A, f"{PREFIX}q_proj.lora_B.weight": lora_B}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        plain = {"peft_type": "LORA", "r": R, "lora_alpha": R, "bias": "none", "target_modules": ["q_proj"]}
        (tmp_path / "adapter_config.json").write_text(json.dumps({**plain, **config}))
        return tmp_path

    return write_folder


class Layer:
    """A stacked parameter: q in rows 0 to 16, k in 16 to 32; and its base."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        self.weight = torch.randn(2 * OUT, IN, generator=torch.Generator().manual_seed(9)).to(dtype)
        self.weight[0, :4] = -0.0
        self.base = self.weight.clone()
        self.targets = {"qkv": InPlace(weight=self.weight, base=self.base)}
        self.pieces = {
            "q": [WeightSlice("qkv", (0, OUT), (0, IN), 0, 0)],
            "k": [WeightSlice("qkv", (0, OUT), (0, IN), OUT, 0)],
        }

    def fuse(self, scaling: float = 1.0, **adapted: tuple[Tensor, Tensor]) -> None:
        fuse(finite("a", scaling, adapted) if adapted else None, self.targets, self.pieces)

    def is_base(self, rows: slice = slice(None)) -> bool:
        return torch.equal(self.weight[rows].view(torch.int16), self.base[rows].view(torch.int16))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("adapter_dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_product_and_sum_are_rounded_once(dtype: torch.dtype, adapter_dtype: torch.dtype) -> None:
    layer = Layer(dtype)
    lora_A, lora_B = matrices(1, adapter_dtype)
    layer.fuse(scaling=0.5, q=(lora_A, lora_B))
    expected = layer.base[:OUT].float() + 0.5 * lora_B.float() @ lora_A.float()
    assert (layer.weight[:OUT].float() - expected).abs().max() <= expected.abs().max() * torch.finfo(dtype).eps / 2
    assert torch.equal(layer.base[OUT:], layer.weight[OUT:])


needs_gpu = [
    pytest.mark.gpu,
    pytest.mark.outside,  # Triton runs a compiler
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here"),
]


@pytest.mark.parametrize("place", [pytest.param(place, marks=needs_gpu) for place in ("gpu", "host")])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rank", [1, 8, 24, 64, 200])
def test_on_a_gpu_too_product_and_sum_are_rounded_once(dtype: torch.dtype, rank: int, place: str) -> None:
    """Pieces of a stacked weight whose sizes no tile divides, the other half of which stays unchanged."""
    random = torch.Generator("cuda").manual_seed(rank)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return (std * torch.randn(rows, columns, generator=random, device="cuda")).to(dtype)

    weight, lora_A, lora_B = normal(700, 333, 0.02), normal(rank, 2 * 333, 0.05), normal(350, rank, 0.05)
    (base,), kept_in = copies_of([weight], place)
    assert kept_in == place
    assert fused_weights.kernel_on(weight.device, dtype) is not None
    piece = WeightSlice("w", (0, 350), (333, 666), 350, 0)
    before = weight.clone()
    fuse(FusedAdapter("a", 0.3, {"m": (lora_A, lora_B)}), {"w": InPlace(weight, base)}, {"m": [piece]})
    assert torch.equal(weight[:350], before[:350])
    exact = before[350:].double() + 0.3 * lora_B.double() @ lora_A[:, 333:].double()
    differs = weight[350:] != exact.to(dtype)
    assert differs.float().mean() < 1e-3  # between two neighbours, where float32 decides
    assert (weight[350:].double() - exact).abs().max() <= exact.abs().max() * torch.finfo(dtype).eps * 0.501
    fuse(None, {"w": InPlace(weight, base)}, {"m": [piece]})
    assert torch.equal(weight, before)


@pytest.mark.gpu
@pytest.mark.outside
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_one_launch_writes_all_layers_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.Generator("cuda").manual_seed(0)

    def normal(rows: int, columns: int, std: float) -> Tensor:
        return (std * torch.randn(rows, columns, generator=random, device="cuda")).to(torch.bfloat16)

    shapes = [(256, 512), (130, 72), (64, 4096), (700, 333)]
    weights = {f"w{n}": normal(*shape, 0.02) for n, shape in enumerate(shapes)}
    targets = {name: InPlace(weight, weight.clone()) for name, weight in weights.items()}
    pieces = {name: [WeightSlice(name, (0, one.shape[0]), (0, one.shape[1]), 0, 0)] for name, one in weights.items()}
    adapter = {name: (normal(8, one.shape[1], 0.05), normal(one.shape[0], 8, 0.05)) for name, one in weights.items()}
    kernel = fused_weights.kernel_on(weights["w0"].device, torch.bfloat16)
    assert kernel is not None
    launches: list[int] = []
    monkeypatch.setattr(
        fused_weights, "kernel_on", lambda *_: lambda jobs: (launches.append(len(jobs)), kernel(jobs))[1]
    )
    fuse(finite("a", 0.5, adapter), targets, pieces)
    assert launches == [4]
    for name, (lora_A, lora_B) in adapter.items():
        exact = targets[name].base.double() + 0.5 * lora_B.double() @ lora_A.double()
        assert (weights[name].double() - exact).abs().max() <= exact.abs().max() * torch.finfo(
            torch.bfloat16
        ).eps * 0.501


@pytest.mark.gpu
@pytest.mark.outside
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device here")
def test_a_launch_writes_what_the_matrices_hold_when_it_runs() -> None:
    weight, lora_A, lora_B = (torch.randn(*shape, device="cuda").half() for shape in ((64, 72), (8, 72), (64, 8)))
    targets = {"w": InPlace(weight, weight.clone())}
    pieces = {"m": [WeightSlice("w", (0, 64), (0, 72), 0, 0)]}
    launch = fuse(finite("a", 0.5, {"m": (lora_A, lora_B)}), targets, pieces)
    lora_B.mul_(2)
    assert launch.is_all
    launch.run(0.25)
    again = weight.clone()
    fuse(finite("b", 0.25, {"m": (lora_A, lora_B)}), targets, pieces)
    assert torch.equal(weight, again)
    assert not fuse(None, targets, pieces).is_all


def test_a_launch_is_everything_if_it_writes_all_rectangles_from_bases_on_its_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class OnGPU:
        """As far as a launch looks at a tensor before it runs."""

        is_cuda, dtype, device = True, torch.bfloat16, torch.device("cuda")

        def __init__(self, stride: int = 1) -> None:
            self._stride = stride

        def stride(self, dimension: int) -> int:
            return self._stride

    def is_all(rectangles: int, *jobs: tuple[Any, ...]) -> bool:
        launch = OneLaunch(rectangles)
        for job in jobs:
            launch.takes(job)  # type: ignore[arg-type]
        return launch.is_all

    monkeypatch.setattr(fused_weights, "kernel_on", lambda *_: object())
    weight = OnGPU()
    good = (weight, OnGPU(), OnGPU(), OnGPU())
    assert is_all(2, good, good)
    assert not is_all(2, good)
    assert not is_all(1, (weight, weight, OnGPU(), OnGPU()))
    assert not is_all(1, (weight, OnGPU(), OnGPU(stride=2), OnGPU()))
    monkeypatch.setattr(fused_weights, "kernel_on", lambda *_: None)
    assert not is_all(1, good)


def test_a_launch_that_is_everything_is_run_again_for_the_same_memory_only() -> None:
    launches, memories = KnownLaunches(), [Matrices(), Matrices(), Matrices(), Matrices()]
    done: list[Any] = []

    def write(memory: int, scaling: float, *, is_all: bool = True) -> list[Any]:
        done.clear()

        def in_full() -> Any:
            done.append("in full")
            return SimpleNamespace(run=done.append, is_all=is_all)

        launches.write(memories[memory], scaling, in_full)
        return list(done)

    assert [write(0, 0.5), write(1, 0.5), write(0, 0.25), write(1, 2.0)] == [["in full"], ["in full"], [0.25], [2.0]]
    assert [write(2, 1.0, is_all=False), write(2, 1.0), write(2, 1.0)] == [["in full"], ["in full"], [1.0]]
    assert write(0, 1.0) == [1.0]
    assert [write(3, 1.0), write(0, 1.0)] == [["in full"], ["in full"]]  # three are kept
    launches.forget()
    assert write(0, 1.0) == ["in full"]


def test_each_fuse_starts_from_the_base() -> None:
    layer, once = Layer(), Layer()
    for seed in range(5):
        layer.fuse(q=matrices(seed), k=matrices(seed + 10))
    once.fuse(q=matrices(4), k=matrices(14))
    assert torch.equal(layer.weight, once.weight)


def test_the_base_comes_back_bit_for_bit() -> None:
    layer = Layer()
    layer.fuse(q=matrices(1), k=matrices(2))
    assert not layer.is_base()
    layer.fuse()
    assert layer.is_base()


def test_an_adapter_of_zeros_is_the_base_bit_for_bit() -> None:
    """W0 holds -0.0, to which adding a zero would give +0.0."""
    layer = Layer()
    lora_A, lora_B = matrices(1)
    layer.fuse(q=(lora_A, torch.zeros_like(lora_B)), k=(torch.zeros_like(lora_A), lora_B))
    assert layer.is_base()


def test_a_module_that_the_next_adapter_lacks_is_the_base_again() -> None:
    layer = Layer()
    layer.fuse(q=matrices(1), k=matrices(2))
    layer.fuse(k=matrices(3))
    assert layer.is_base(slice(0, OUT))
    assert not layer.is_base(slice(OUT, None))


def test_shards_get_their_rows_and_columns_of_the_product() -> None:
    lora_A, lora_B = matrices(1)
    weight = torch.zeros(4, 3)
    piece = WeightSlice("w", (5, 9), (2, 5), 0, 0)
    fuse(FusedAdapter("a", 1.0, {"m": (lora_A, lora_B)}), {"w": InPlace(weight, weight.clone())}, {"m": [piece]})
    assert torch.allclose(weight, (lora_B.float() @ lora_A.float())[5:9, 2:5], atol=1e-6)


def two_modules(width: int) -> list[Tensor]:
    """lora_A and lora_B of one module, and of another."""
    return [torch.full(shape, 1e-30) for shape in ((R, width), (2 * width, R)) * 2]


def read_whole(write: Write, *matrices: Tensor) -> FusedAdapter:
    """Matrices as they lie in the memory of one file: lora_A and lora_B of module 0, of module 1, ..."""
    names = [f"{PREFIX}{index // 2}.lora_{'AB'[index % 2]}.weight" for index in range(len(matrices))]
    return Reader(torch.device("cpu")).read("a", read_head(str(write(dict(zip(names, matrices, strict=True))))))


# As wide as one look at all of them needs, and too narrow for it.
@pytest.mark.parametrize("width", [256, 3])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_matrices_of_a_file_are_left_out_if_all_is_zero(write: Write, width: int, zero: int) -> None:
    tensors = two_modules(width)
    tensors[3 - zero].neg_()
    tensors[zero].fill_(-0.0)
    found = read_whole(write, *tensors)
    assert list(found.matrices) == [f"layers.0.{1 - zero // 2}"]


@pytest.mark.parametrize("width", [256, 3])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bad", [0, 1, 2, 3])
def test_a_value_of_a_file_that_is_not_finite_is_found(write: Write, width: int, value: float, bad: int) -> None:
    tensors = two_modules(width)
    tensors[bad][-1, -1] = value
    with pytest.raises(AdapterFileError, match=rf"infinity, in layers\.0\.{bad // 2}\.lora_{'AB'[bad % 2]}\.$"):
        read_whole(write, *tensors)


def test_files_with_one_header_have_the_same_modules(write: Write) -> None:
    first, second = read_head(str(write())), read_head(str(write()))
    assert second.content is first.content
    assert second.scaling == first.scaling
    other = read_head(
        str(write({f"{PREFIX}k.lora_A.weight": matrices()[0], f"{PREFIX}k.lora_B.weight": matrices()[1]}))
    )
    assert list(other.content.modules) == ["layers.0.k"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_an_adapter_that_is_not_finite_is_refused_by_name(value: float, place: int) -> None:
    pair = matrices()
    pair[place][0, 0] = value
    with pytest.raises(AdapterFileError, match=f"q.lora_{'AB'[place]}"):
        finite("a", 1.0, {"q": pair})


def test_the_base_copy_is_no_alias() -> None:
    weight = torch.ones(2, 2)
    [copy], place = copies_of([weight], "auto")
    weight.zero_()
    assert copy.sum() == 4
    assert place == "host"


class OnGPU(Tensor):
    """A tensor on the CPU that `copies_of` takes for one on a GPU."""

    device = torch.device("cuda")


def test_copies_of_the_base_are_unpinned_before_they_go_if_a_later_one_cannot_be_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They were freed while CUDA had them registered, and CUDA's error came up in the next forward pass."""
    held: list[weakref.ref[Tensor]] = []
    were_there: list[bool] = []

    def pin(memory: Tensor, device: torch.device) -> Callable[[], None]:
        if len(held) == 2:
            raise PinError("cudaHostRegister: out of memory")
        alive = weakref.ref(memory)
        held.append(alive)
        return lambda: were_there.append(alive() is not None)

    monkeypatch.setattr(fused_weights, "pin", pin)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 0))
    weights = [torch.zeros(1 << 18).as_subclass(OnGPU) for _ in range(4)]  # of 1 MiB, the least that is pinned apart
    with pytest.raises(PinError, match="out of memory"):
        copies_of(weights, "host")
    assert were_there == [True, True]
    held.clear()
    were_there.clear()
    copies, place = copies_of(weights[:2], "host")
    assert (len(copies), place, were_there) == (2, "host", [])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_an_adapter_is_read_as_it_was_written(write: Write, dtype: torch.dtype) -> None:
    pair = matrices(3, dtype)
    names = [f"{PREFIX}self_attn.q_proj.lora_{kind}.weight" for kind in "AB"]
    head = read_head(str(write(dict(zip(names, pair, strict=True)), lora_alpha=3)))
    assert head.scaling == 1.5
    [(module, found)] = Reader(torch.device("cpu")).read("a", head).matrices.items()
    assert module == "layers.0.self_attn.q_proj"
    assert all(torch.equal(one, other) for one, other in zip(found, pair, strict=True))


def test_two_adapters_that_were_read_are_both_kept(write: Write) -> None:
    reader = Reader(torch.device("cpu"))
    first = reader.read("a", read_head(str(write())))
    kept = [tensor.clone() for tensor in first.matrices["layers.0.q_proj"]]
    other = dict(zip([f"{PREFIX}q_proj.lora_{kind}.weight" for kind in "AB"], matrices(7), strict=True))
    second = reader.read("b", read_head(str(write(other))))
    assert all(torch.equal(*pair) for pair in zip(first.matrices["layers.0.q_proj"], kept, strict=True))
    assert all(torch.equal(*pair) for pair in zip(second.matrices["layers.0.q_proj"], matrices(7), strict=True))


def test_memory_is_used_again_once_its_adapter_is_gone(write: Write) -> None:
    reader = Reader(torch.device("cpu"))
    first, second = (reader.read(name, read_head(str(write()))) for name in "ab")
    assert second.matrices is not first.matrices
    of_first = first.matrices
    del first
    other = dict(zip([f"{PREFIX}q_proj.lora_{kind}.weight" for kind in "AB"], matrices(7), strict=True))
    third = reader.read("c", read_head(str(write(other))))
    assert third.matrices is of_first
    assert all(torch.equal(*pair) for pair in zip(third.matrices["layers.0.q_proj"], matrices(7), strict=True))
    assert reader.read("d", read_head(str(write(lora_alpha=0)))).matrices == {}


def test_rank_stabilised_scaling_is_known(write: Write) -> None:
    assert read_head(str(write(use_rslora=True, lora_alpha=3))).scaling == 3 / math.sqrt(R)


@pytest.mark.parametrize(
    "config",
    [{"lora_alpha": value} for value in (math.nan, math.inf, -math.inf)]
    + [{"r": value} for value in (0, -2, math.nan, math.inf)]
    + [{"r": 0, "use_rslora": True}],
    ids=str,
)
def test_configuration_without_a_finite_scaling_is_refused(write: Write, config: dict[str, Any]) -> None:
    """A lora_alpha of NaN was written into the weights, and a rank of 0 was an error of the server."""
    with pytest.raises(AdapterFileError, match=r"r=\S+ and lora_alpha=\S+,.*at least 1 and.*finite"):
        read_head(str(write(**config)))


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"rank_pattern": {"q_proj": 4}},
        {"alpha_pattern": {"q_proj": 4}},
        {"peft_type": "IA3"},
        {"fan_in_fan_out": True},
        {"target_parameters": ["experts"]},
    ],
)
def test_what_is_no_plain_lora_is_refused(write: Write, config: dict[str, Any]) -> None:
    with pytest.raises(AdapterFileError, match=f"not a plain LoRA.*{next(iter(config))}"):
        read_head(str(write(**config)))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"base_model.model.lm_head.gamma": torch.ones(2, 2)}, "does not know"),
        ({f"{PREFIX}q_proj.lora_A.weight": torch.ones(2, 2)}, "do not belong together"),
        (
            {f"{PREFIX}q.lora_A.weight": torch.ones(2, 8), f"{PREFIX}q.lora_B.weight": torch.ones(8, 3)},
            "do not belong together",
        ),
        ({f"{PREFIX}q.lora_A.weight": torch.ones(2)}, "cannot be used"),
        ({f"{PREFIX}q.lora_A.weight": torch.ones(2, 2, dtype=torch.int8)}, "cannot be used"),
    ],
)
def test_tensors_that_are_no_adapter_are_refused(write: Write, tensors: dict[str, Tensor], words: str) -> None:
    with pytest.raises(AdapterFileError, match=words):
        read_head(str(write(tensors)))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_called_missing(write: Write, name: str) -> None:
    folder = write()
    (folder / name).unlink()
    with pytest.raises(AdapterFileError, match="No adapter found") as caught:
        read_head(str(folder))
    assert caught.value.is_missing


@pytest.mark.parametrize("note", [None, "", '{"head": "12'])
def test_a_version_whose_note_does_not_show_yet_is_called_missing(write: Write, note: str | None) -> None:
    """It was fused as an adapter of another origin, and not compared by anything."""
    folder = write(lora_sync_note=NOTE_FORM)
    if note is not None:
        (folder / "lora_sync.json").write_text(note)
    with pytest.raises(AdapterFileError, match=r"No adapter found.*lora_sync\.json") as caught:
        read_head(str(folder))
    assert caught.value.is_missing
    assert read_head(str(write(lora_sync_note="of another release"))).note is None


@pytest.mark.parametrize("length", [0, 4, 60, -10])
def test_a_file_that_was_cut_short_is_refused(write: Write, length: int) -> None:
    """In words after which the trainer tries again, as a network file system may show a part of it first."""
    file = write() / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(AdapterFileError, match=CUT_OFF):
        read_head(str(file.parent))


def test_a_file_that_shrinks_after_its_head_was_read_is_refused(write: Write) -> None:
    head = read_head(str(write()))
    head.file.write_bytes(head.file.read_bytes()[:-1])
    with pytest.raises(AdapterFileError, match="not written completely"):
        Reader(torch.device("cpu")).read("a", head)


@pytest.mark.parametrize(
    ("error", "words", "is_missing"),
    [
        (TimeoutError("Its trainer has not finished the file in 20 s."), "has not finished the file", False),
        (PermissionError(errno.EACCES, "Permission denied"), "Permission denied", False),
        (OSError(errno.EIO, "Input/output error"), "Input/output error", False),
        (FileNotFoundError(errno.ENOENT, "No such file or directory"), "No such file", True),
    ],
    ids=["its trainer hangs", "not allowed", "a broken disk", "gone"],
)
def test_only_a_file_that_is_gone_is_called_missing_when_it_is_read(
    error: OSError, words: str, is_missing: bool, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer whose copy hangs was reported as a missing adapter, with "(None)" for the reason."""

    def read(*args: object) -> None:
        raise error

    monkeypatch.setattr(fetching.Fetcher, "read", read)
    with pytest.raises(AdapterFileError, match=rf"cannot be read \(.*{words}") as caught:
        Reader(torch.device("cpu")).read("a", read_head(str(write())))
    assert caught.value.is_missing is is_missing
