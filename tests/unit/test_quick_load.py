"""Unit tier: adapters that vLLM's workers read with several threads; vLLM itself is stood in for by the truth."""

import asyncio
import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from trl_lora_sync.engine_plugins import safetensors_file, vllm_quick_load_worker
from trl_lora_sync.engine_plugins.safetensors_file import DTYPES, ParallelReader, ShortFileError
from trl_lora_sync.engine_plugins.version_note import NOTE_FORM
from trl_lora_sync.engine_plugins.vllm_quick_load import (
    ADAPTERS_HEADER,
    CHECKS_HEADER,
    DTYPE_HEADER,
    EXPERTS_HEADER,
    GPUS_HEADER,
    RANK_HEADER,
    RESERVE_ROUTE,
    WRITE_SLOTS,
    QuickLoadMiddleware,
    writes_slots,
)
from trl_lora_sync.engine_plugins.vllm_quick_load_worker import KnownFiles, QuickLoadWorker, quick_model

FILE = "adapter_model.safetensors"
PREFIX = "base_model.model.model.layers"


class Usual:
    """Loads as vLLM does, and notes which way was taken; the signatures match its `LoRAModel` (0.26, 0.31)."""

    ways: list[str]

    def __init__(self, lora_model_id: int, tensors: dict[str, Tensor], helper: object) -> None:
        self.id, self.tensors, self.helper = lora_model_id, tensors, helper

    @classmethod
    def from_lora_tensors(
        cls, lora_model_id: int, tensors: dict[str, Tensor], peft_helper: object, device: str = "cuda",
        dtype: torch.dtype | None = None, model_vocab_size: int | None = None, weights_mapper: object = None,
        skip_prefixes: list[str] | None = None,
    ) -> Any:  # fmt: skip
        assert device == "cpu"
        cls.ways.append("tensors")
        return cls(lora_model_id, {name: tensor.to(dtype) for name, tensor in tensors.items()}, peft_helper)

    @classmethod
    def from_local_checkpoint(
        cls, lora_dir: str, expected_lora_modules: set[str], peft_helper: object, *, lora_model_id: int | None = None,
        device: str = "cuda", dtype: torch.dtype | None = None, model_vocab_size: int | None = None,
        weights_mapper: object = None, tensorizer_config_dict: object = None, skip_prefixes: list[str] | None = None,
        moe_ep_spec: object = None,
    ) -> Any:  # fmt: skip
        tensors = load_file(Path(lora_dir) / FILE)
        strange = {name.split(".")[-3] for name in tensors} - expected_lora_modules
        if strange:
            raise ValueError(f"unexpected {strange}")
        cls.ways.append("usual")
        return cls.from_lora_tensors(lora_model_id or 1, tensors, peft_helper, device, dtype)


class Worker(QuickLoadWorker):
    """A worker of vLLM, reduced to the parts in use."""

    def __init__(self, folder: Path, device: str = "cpu", *, mixes_experts: bool = False) -> None:
        self.ways: list[str] = []
        self.folder = folder
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size=1))
        self.model_runner = SimpleNamespace(
            lora_manager=SimpleNamespace(
                _lora_model_cls=type("Noting", (Usual,), {"ways": self.ways}),
                lora_config=SimpleNamespace(
                    max_cpu_loras=4,
                    max_lora_rank=16,
                    enable_mixed_moe_lora_format=mixes_experts,
                    lora_dtype=torch.bfloat16,
                ),
                device=torch.device(device),
            )
        )
        self.answer = self.lora_sync_load_quickly()
        assert self.answer["error"] == ""

    def load(self, tensors: dict[str, Tensor] | None = None, **changes: Any) -> tuple[list[str], dict[str, Tensor]]:
        """Which way an adapter came, and its tensors."""
        if tensors is not None:
            save_file(tensors, self.folder / FILE)
        self.ways.clear()
        options: dict[str, Any] = {
            "lora_model_id": 7,
            "device": "cpu",
            "dtype": torch.bfloat16,
            "model_vocab_size": 260,
            "tensorizer_config_dict": None,
            "weights_mapper": None,
            "skip_prefixes": None,
            "moe_ep_spec": None,
        } | changes
        helper = object()
        loaded = self.model_runner.lora_manager._lora_model_cls.from_local_checkpoint(
            str(self.folder), {"q_proj", "down_proj"}, peft_helper=helper, **options
        )
        assert loaded.id == 7
        assert loaded.helper is helper
        return list(self.ways), loaded.tensors


USUALLY, QUICKLY = ["usual", "tensors"], ["tensors"]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


def adapter(
    seed: int, rank: int = 4, dtype: torch.dtype = torch.bfloat16, module: str = "down_proj"
) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(seed)
    return {
        f"{PREFIX}.{layer}.{name}.lora_{kind}.weight": torch.randn(shape, generator=random).to(dtype)
        for layer in range(3)
        for name in ("q_proj", module)
        for kind, shape in (("A", (rank, 24)), ("B", (40, rank)))
    }


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# Of 12 matrices, of 192 and 320 bytes by turns.
@pytest.mark.parametrize(("buffer_bytes", "buffers"), [(1, 12), (600, 6), (1 << 20, 1)])
def test_from_the_second_of_a_kind_on_tensors_are_read_here_and_are_the_same(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, buffer_bytes: int, buffers: int
) -> None:
    monkeypatch.setattr(vllm_quick_load_worker, "BUFFER_BYTES", buffer_bytes)
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 100)
    for seed in range(4):
        tensors = adapter(seed)
        way, found = worker.load(tensors)
        assert way == (QUICKLY if seed else USUALLY)
        assert same(found, tensors)
        storages = {tensor.untyped_storage().data_ptr() for tensor in found.values()}
        assert not seed or len(storages) == buffers


def test_tensors_do_not_change_with_the_file(worker: Worker) -> None:
    worker.load(adapter(0))
    way, found = worker.load(adapter(1))
    assert way == QUICKLY
    (worker.folder / FILE).write_bytes(bytes((worker.folder / FILE).stat().st_size))
    assert same(found, adapter(1))


def test_kinds_may_alternate(worker: Worker) -> None:
    kinds = [adapter(0), adapter(0, rank=8), adapter(0, module="q_proj")]
    assert [worker.load(kind)[0] for kind in kinds * 2] == [USUALLY] * 3 + [QUICKLY] * 3


def test_the_kinds_that_were_not_seen_for_long_are_forgotten(worker: Worker) -> None:
    ranks = range(1, vllm_quick_load_worker.KINDS + 2)
    for rank in ranks:
        worker.load(adapter(0, rank=rank))
    assert worker.load(adapter(0, rank=ranks[0]))[0] == USUALLY
    assert worker.load(adapter(0, rank=ranks[-1]))[0] == QUICKLY


@pytest.mark.parametrize(
    "changes", [{"tensorizer_config_dict": {"a": 1}}, {"moe_ep_spec": object()}, {"dtype": torch.float16}]
)
def test_what_is_not_understood_is_left_to_vllm(worker: Worker, changes: dict[str, Any]) -> None:
    tensors = adapter(0)
    worker.load(tensors)
    assert worker.load(**changes)[0] == USUALLY
    assert worker.load()[0] == QUICKLY


@pytest.mark.parametrize(
    "tensors",
    [
        adapter(0, dtype=torch.float32),
        {**adapter(0), f"{PREFIX}.0.q_proj.lora_A.weight": torch.zeros(4, 24)},
        {**adapter(0), f"{PREFIX}.0.q_proj.lora_magnitude_vector.weight": torch.zeros(4, dtype=torch.bfloat16)},
    ],
)
def test_other_tensors_than_matrices_of_the_served_dtype_are_left_to_vllm(
    worker: Worker, tensors: dict[str, Tensor]
) -> None:
    assert [worker.load(tensors)[0] for _ in range(2)] == [USUALLY] * 2


def test_what_vllm_refused_is_shown_to_it_again(worker: Worker) -> None:
    for _ in range(2):
        with pytest.raises(ValueError, match="unexpected"):
            worker.load(adapter(0, module="lm_head"))


def test_a_file_that_is_cut_short_or_gone_gets_the_words_of_vllm(worker: Worker) -> None:
    worker.load(adapter(0))
    file = worker.folder / FILE
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(Exception, match=r"[Ii]ncomplete"):
        worker.load()
    file.unlink()
    with pytest.raises(FileNotFoundError):
        worker.load()


def test_a_worker_tells_up_to_which_rank_it_takes_adapters(worker: Worker) -> None:
    assert worker.answer["rank"] == "16"


def test_a_worker_tells_in_which_dtype_it_keeps_adapters(worker: Worker) -> None:
    assert DTYPES[worker.answer["dtype"]] == torch.bfloat16


def test_a_worker_without_lora_says_so() -> None:
    worker = Worker.__new__(Worker)
    worker.model_runner = SimpleNamespace()
    assert "lora_manager" in worker.lora_sync_load_quickly()["error"]


def test_a_quick_model_is_one_of_vllms() -> None:
    assert issubclass(quick_model(Usual, KnownFiles(1)), Usual)


# Reading


def test_a_file_that_ends_early_is_an_error_and_no_thread_reads_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first part is missing as a whole, and the following parts are still being read."""
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 100)
    (tmp_path / "file").write_bytes(bytes(1000))
    read_now, reading = safetensors_file.read_into, []

    def read_slowly(file: int, view: memoryview, offset: int) -> None:
        reading.append(offset)
        try:
            if offset > 1000:
                time.sleep(0.05)
            read_now(file, view, offset)
        finally:
            reading.remove(offset)

    monkeypatch.setattr(safetensors_file, "read_into", read_slowly)
    with (tmp_path / "file").open("rb") as file:
        with pytest.raises(ShortFileError, match="shorter than its header promises"):
            list(ParallelReader().read(file.fileno(), memoryview(bytearray(1000)), 1000))
        assert not reading


def test_parts_come_in_order_and_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safetensors_file, "CHUNK_BYTES", 7)
    content = bytes(range(250)) * 4
    (tmp_path / "file").write_bytes(content)
    into = bytearray(900)
    with (tmp_path / "file").open("rb") as file:
        end = 0
        for part in ParallelReader().read(file.fileno(), memoryview(into), 100):
            assert part.start == end
            end = part.stop
            assert into[part] == content[100:][part]
    assert end == 900


# The server's side


HEADERS = (CHECKS_HEADER, EXPERTS_HEADER, DTYPE_HEADER, GPUS_HEADER, RANK_HEADER)
FINE = {"error": "", "slots": "", "off": "", "experts": "", "dtype": "", "rank": ""}


@pytest.mark.parametrize(
    ("device", "choice", "is_tried"),
    [
        ("cpu", None, True),
        ("cpu", "1", True),
        ("cpu", "0", False),
        ("cuda", None, True),
        ("cuda", "", True),
        ("cuda", "0", False),
        ("cuda", "1", True),
    ],
)
def test_slots_are_written_unless_the_variable_forbids_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, device: str, choice: str | None, is_tried: bool
) -> None:
    """Of what they need there is nothing here, which shows that it was looked for."""
    if choice is None:
        monkeypatch.delenv(WRITE_SLOTS, raising=False)
    else:
        monkeypatch.setenv(WRITE_SLOTS, choice)
    answer = Worker(worker.folder, device).answer
    assert answer["slots"].startswith("AttributeError: ") is is_tried
    assert (WRITE_SLOTS in answer["off"]) is not is_tried
    assert writes_slots({} if choice is None else {WRITE_SLOTS: choice}) is is_tried


def test_a_worker_that_writes_no_slots_loads_a_trainers_versions_as_any_adapter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(WRITE_SLOTS, "0")
    worker = Worker(tmp_path, "cuda")
    (tmp_path / "lora_sync.json").write_text("{}")
    assert [worker.load(adapter(seed))[0] for seed in range(3)] == [USUALLY, QUICKLY, QUICKLY]


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([FINE, FINE], "written into their slots directly, and other adapters are read with several threads"),
        ([FINE, FINE | {"slots": "AttributeError: x"}], "not written into the slots.*AttributeError: x"),
        ([FINE, FINE | {"off": "because"}], r"not written into their slots directly \(because\)"),
        ([FINE, FINE | {"error": "AttributeError: x"}], "loaded the usual way.*AttributeError: x"),
        (RuntimeError("no such method"), "loaded the usual way.*no such method"),
    ],
)
def test_workers_are_asked_before_the_server_starts_which_it_does_in_any_case(
    answers: Any, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    asked, passed = [], []

    async def collective_rpc(method: str) -> list[dict[str, str]]:
        asked.append(method)
        if isinstance(answers, Exception):
            raise answers
        return answers  # type: ignore[no-any-return]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["type"])

    async def run() -> None:
        middleware = QuickLoadMiddleware(app)
        engine = SimpleNamespace(collective_rpc=collective_rpc)
        server = SimpleNamespace(state=SimpleNamespace(engine_client=engine))
        for kind in ("lifespan", "http", "websocket"):
            await middleware({"type": kind, "path": "/", "app": server}, None, None)  # type: ignore[arg-type]

    with caplog.at_level("INFO", logger="vllm.trl_lora_sync"):
        asyncio.run(run())
    assert asked == ["lora_sync_load_quickly"]
    assert passed == ["lifespan", "http", "websocket"]
    assert re.search(words, caplog.messages[0])


def app_of(engine: Any, api_key: list[str] | None = None, **state: Any) -> Any:
    """vLLM's application."""
    return SimpleNamespace(state=SimpleNamespace(engine_client=engine, args=SimpleNamespace(api_key=api_key), **state))


def request_of(server: Any, **changes: Any) -> dict[str, Any]:
    """The scope of a load."""
    load = {"type": "http", "method": "POST", "path": "/v1/load_lora_adapter", "headers": [], "app": server}
    return load | changes


KEY = [(b"authorization", b"Bearer secret")]


@pytest.mark.parametrize(
    ("key", "changes", "is_told"),
    [
        (None, {}, True),
        (["secret"], {"headers": KEY}, True),
        (["secret"], {"headers": KEY, "path": "/api/v1/load_lora_adapter", "root_path": "/api"}, True),
        (["secret"], {}, False),
        (["secret"], {"headers": [(b"authorization", b"Bearer wrong")]}, False),
        (["secret"], {"headers": KEY, "method": "GET"}, False),
        (None, {"path": "/nothing/v1/load_lora_adapter"}, False),
        (None, {"method": "OPTIONS"}, False),
    ],
)
def test_what_answers_to_loads_tell_is_for_clients_with_the_key(
    key: list[str] | None, changes: dict[str, Any], is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each answer of a path with that end had the names and paths of all adapters, 401 and 404 too."""
    monkeypatch.delenv("VLLM_API_KEY", raising=False)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})

    async def collective_rpc(method: str) -> list[dict[str, str]]:
        return [FINE | {"gpus": "GPU-1", "rank": "16"}]

    async def run() -> set[bytes]:
        sent: list[Any] = []

        async def note(message: Any) -> None:
            sent.append(message)

        models = SimpleNamespace(lora_requests={"v1": SimpleNamespace(lora_name="v1", lora_path="/v1")})
        server = app_of(SimpleNamespace(collective_rpc=collective_rpc), key, openai_serving_models=models)
        middleware = QuickLoadMiddleware(app)
        await middleware({"type": "lifespan", "app": server}, None, note)  # type: ignore[arg-type]
        sent.clear()
        await middleware(request_of(server, **changes), None, note)  # type: ignore[arg-type]
        return {name for name, _ in sent[0]["headers"]} - {b"a"}

    told = {name.encode() for name in (CHECKS_HEADER, GPUS_HEADER, RANK_HEADER, ADAPTERS_HEADER)}
    assert asyncio.run(run()) == (told if is_told else set())


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ({"gpus": "GPU-1,GPU-2"}, (NOTE_FORM, None, None, "GPU-1,GPU-2", None)),
        ({}, (NOTE_FORM, None, None, "", None)),
        ({"slots": "AttributeError: x"}, ("none", None, None, None, None)),
        ({"off": "because", "dtype": "F16", "rank": "16"}, ("none", None, "F16", None, "16")),
        ({"error": "x", "experts": "stacked", "dtype": "BF16", "rank": "16"}, (None, None, None, None, None)),
        ({"off": "because", "experts": "stacked"}, ("none", "stacked", None, None, None)),
        ({"dtype": "BF16"}, (NOTE_FORM, None, "BF16", "", None)),
    ],
)
def test_answers_to_loads_say_whether_versions_are_compared_in_which_form_and_rank_and_which_gpus_are_seen(
    reason: dict[str, str], expected: tuple[str | None, ...]
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"a", b"b")]})
        await send({"type": "http.response.body", "body": b"x"})

    async def collective_rpc(method: str) -> list[dict[str, str]]:
        return [FINE | reason]

    async def run() -> list[tuple[str | None, ...]]:
        async def ignore(message: Any) -> None:
            pass

        middleware = QuickLoadMiddleware(app)
        server = app_of(SimpleNamespace(collective_rpc=collective_rpc))
        await middleware({"type": "lifespan", "app": server}, None, ignore)  # type: ignore[arg-type]
        found = []
        for path in ("/v1/load_lora_adapter", "/v1/models"):
            sent: list[Any] = []

            async def note(message: Any, sent: list[Any] = sent) -> None:
                sent.append(message)

            await middleware(request_of(server, path=path), None, note)  # type: ignore[arg-type]
            headers = dict(sent[0]["headers"])
            assert headers[b"a"] == b"b"
            ours = [headers.get(name.encode()) for name in HEADERS]
            found.append(tuple(None if one is None else one.decode() for one in ours))
        return found

    assert asyncio.run(run()) == [expected, (None,) * len(HEADERS)]


@pytest.mark.parametrize(
    ("adapters", "expected"),
    [
        ([("a-v1", "/sync/ä")], {"a-v1": "/sync/ä"}),
        ([], {}),
        ([("a-v1", "/" + 4096 * "x")], None),
        (None, None),
    ],
)
def test_answers_to_loads_list_the_adapters_that_the_server_has_then(
    adapters: list[tuple[str, str]] | None, expected: dict[str, str] | None
) -> None:
    models = SimpleNamespace(lora_requests={})
    found = {} if adapters is None else {"openai_serving_models": models}

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for name, path in adapters or ():
            models.lora_requests[name] = SimpleNamespace(lora_name=name, lora_path=path)
        await send({"type": "http.response.start", "status": 200})

    async def collective_rpc(method: str) -> list[dict[str, str]]:
        return [FINE]

    async def run() -> Any:
        sent: list[Any] = []

        async def note(message: Any) -> None:
            sent.append(message)

        server = app_of(SimpleNamespace(collective_rpc=collective_rpc), **found)
        middleware = QuickLoadMiddleware(app)
        await middleware({"type": "lifespan", "app": server}, None, note)  # type: ignore[arg-type]
        sent.clear()
        await middleware(request_of(server), None, note)  # type: ignore[arg-type]
        return dict(sent[0]["headers"]).get(ADAPTERS_HEADER.encode())

    listed = asyncio.run(run())
    assert (None if listed is None else json.loads(listed)) == expected


FIELDS = {"lora_name": "a-v2", "lora_path": "/a-v2", "head": "digest"}


@pytest.mark.parametrize(
    ("changes", "fields", "workers", "status"),
    [
        ({}, FIELDS, ["one", "two"], 200),
        ({}, FIELDS, ["one", ""], 200),
        ({}, FIELDS | {"folder": "/gone"}, [], 409),
        ({}, {"lora_name": "a-v2"}, [], 400),
        ({}, [1], [], 400),
        ({"method": "GET"}, FIELDS, [], 405),
        ({"headers": []}, FIELDS, [], 401),
    ],
)
def test_slots_are_reserved_in_all_workers_or_none_for_clients_with_the_key(
    changes: dict[str, Any],
    fields: Any,
    workers: list[str],
    status: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = SimpleNamespace(LoRARequest=lambda name, number, path: SimpleNamespace(lora_name=name, lora_int_id=number))
    monkeypatch.setitem(sys.modules, "vllm.lora.request", made)
    asked: list[tuple[Any, ...]] = []
    sent: list[Any] = []

    async def collective_rpc(method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        asked.append(args)
        loaded = dict.fromkeys(("error", "slots", "off", "experts", "dtype", "rank"), "")
        return [loaded] if method == "lora_sync_load_quickly" else workers

    async def app(scope: Any, receive: Any, send: Any) -> None:
        pass

    async def receive() -> Any:
        body = fields if isinstance(fields, list) else {"folder": str(tmp_path)} | fields
        return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    async def run() -> None:
        models = SimpleNamespace(lora_requests={"a-v1": None}, lora_id_counter=SimpleNamespace(inc=lambda by: 7))
        engine = SimpleNamespace(collective_rpc=collective_rpc)
        server = app_of(engine, ["secret"])
        server.state.openai_serving_models = models
        middleware = QuickLoadMiddleware(app)
        await middleware({"type": "lifespan", "app": server}, None, send)  # type: ignore[arg-type]
        scope = request_of(server, path=RESERVE_ROUTE, headers=KEY) | changes
        await middleware(scope, receive, send)
        assert [*models.lora_requests] == ["a-v1"]

    asyncio.run(run())
    assert sent[0]["status"] == status
    if status == 200:
        answer = json.loads(sent[1]["body"])
        assert bool(answer["reservation"]) is all(workers)
        name, number, head, _, listed, socket_path, reservation = asked[-1]
        assert (name, number, head, listed) == ("a-v2", 7, "digest", 1)
        assert not all(workers) or answer == {"reservation": reservation, "socket": Path(socket_path).name}
    else:
        assert len(asked) == 1


def test_a_worker_says_whether_it_takes_experts_in_one_tensor(worker: Worker) -> None:
    assert [Worker(worker.folder, mixes_experts=mixes).answer["experts"] for mixes in (False, True)] == ["", "stacked"]


@pytest.mark.outside
def test_the_server_needs_the_standard_library_only_and_the_worker_torch(run_python: Callable[..., str]) -> None:
    source = """
import sys
for name in ("trl", "peft", "transformers", "httpx", "safetensors", "vllm", *{blocked}):
    sys.modules[name] = None
from trl_lora_sync.engine_plugins.vllm_quick_load import MIDDLEWARE, WORKER, QuickLoadMiddleware as found
{more}
print([name for name in sys.modules if name.startswith("trl_lora_sync.") and ".engine_plugins" not in name])
print(found.__module__ + "." + found.__name__ in (MIDDLEWARE, WORKER))
"""
    # vLLM refuses an extension of its worker with a name that the worker has.
    names = "print([name for name in dir(found) if not name.startswith(('__', 'lora_sync_'))])"
    assert run_python(source.format(blocked="('torch',)", more="")).split() == ["[]", "True"]
    worker = "from trl_lora_sync.engine_plugins.vllm_quick_load_worker import QuickLoadWorker as found"
    assert run_python(source.format(blocked="()", more=worker) + names).split() == ["[]", "True", "[]"]


def test_memory_for_all_adapters_that_vllm_keeps_is_allocated_with_the_first_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each of the first syncs of a run would wait for pinned memory."""
    asked: list[int] = []
    allocate = vllm_quick_load_worker.memory_for
    monkeypatch.setattr(
        vllm_quick_load_worker, "memory_for", lambda buffer: asked.append(buffer.size) or allocate(buffer)
    )
    worker, tensors = Worker(tmp_path), adapter(1)
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())

    worker.load(tensors)
    assert asked == [size] * 5
    worker.load(adapter(2))
    assert asked == [size] * 6
