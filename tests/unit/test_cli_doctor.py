"""Unit tier: the doctor's report on healthy servers, on faulty ones, and on none. SGLang's rules, as a fake."""

import json
import re
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from contract.served import SMALL, soon
from make_model import make_model

from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.checks.finding import Finding
from trl_lora_sync.checks.listed import CHECKS
from trl_lora_sync.checks.subject import Expected, Subject
from trl_lora_sync.cli.main import main
from trl_lora_sync.engine_plugins import cuda_ipc
from trl_lora_sync.engines.base import Capabilities
from trl_lora_sync.runtime import run as run_on_loop
from trl_lora_sync.settings import ServerAddress
from trl_lora_sync.testing import MODULES, FakeSGLang, ModelPolicy, random_adapter
from unit.servers import Request, nobody_listening, serving
from unit.tiny import base_model

pytestmark = pytest.mark.outside

Start = Callable[..., FakeSGLang]
CAPABILITIES = Capabilities(
    engine="vllm", version="0.31.0", base_model="M", base_root="M", max_model_len=None, logprobs_mode="unknown"
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:
        yield lambda **args: stack.enter_context(FakeSGLang(**{"shapes": SMALL, **args}))


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", random_adapter(SMALL, 1, rank=8))
    return tmp_path / "adapter"


def diagnose(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, list[dict[str, Any]]]:
    """Exit status, and what was found at each server."""
    code = main(["doctor", "--timeout", "60", *map(str, arguments), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    return code, found["servers"]


def words(server: dict[str, Any], status: str) -> dict[str, str]:
    return {one["name"]: one["words"] for one in server["findings"] if one["status"] == status}


@pytest.mark.parametrize("typed", [["http://a:1,http://a:1/"], ["http://a:1", "http://a:1/v1"]])
def test_a_server_given_twice_is_refused_as_in_a_run(typed: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *typed]) == 2
    assert "http://a:1 is given more than once" in capsys.readouterr().err


def test_good_server_and_adapter_pass_and_nothing_is_left(
    start: Start, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = start()
    code, [server] = diagnose(capsys, fake.base_url, "--adapter", adapter, "--dir", tmp_path / "shared")
    assert code == 0
    assert (server["engine"], server["version"]) == ("sglang", "0.5.23")
    assert not words(server, "problem")
    assert words(server, "ok").keys() >= {"adapter", "effect", "clean-up", "target modules", "log-probabilities"}
    assert "not compared" in words(server, "note")["PEFT"]
    assert "means little if the adapter is young" in words(server, "ok")["effect"]
    assert not fake.host_adapters
    assert not (tmp_path / "shared").exists()


def test_untrained_adapter_is_expected_to_change_nothing(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    zero = random_adapter(SMALL, 1, rank=8)
    for name, tensor in zero.tensors.items():
        if "lora_B" in name:
            tensor.zero_()
    write_adapter(tmp_path / "zero", zero)
    code, [server] = diagnose(capsys, start().base_url, "--adapter", tmp_path / "zero", "--dir", tmp_path / "shared")
    assert code == 0
    assert "no difference is expected" in words(server, "note")["effect"]


def test_adapter_that_is_not_served_is_a_problem(
    start: Start, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does with tensor names that match no layer: the load succeeds, and the base answers."""
    from trl_lora_sync.engines.sglang.engine import SGLangEngine

    monkeypatch.setattr(SGLangEngine, "lora_path", lambda self, model: None)
    fake = start()
    code, [server] = diagnose(capsys, fake.base_url, "--adapter", adapter, "--dir", tmp_path / "shared")
    assert code == 1
    assert "as if there were no adapter" in words(server, "problem")["effect"]
    assert not fake.host_adapters


@pytest.mark.parametrize("is_served", [True, False])
@pytest.mark.parametrize(("std", "status"), [(1e-4, "note"), (0.08, "ok")])
def test_adapter_of_less_effect_than_rounding_shows_nothing_of_the_server(
    std: float,
    status: str,
    is_served: bool,
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After three steps at 1e-6 it was a problem of a healthy server, or an `ok` for rounding."""
    from trl_lora_sync.engines.sglang.engine import SGLangEngine

    if not is_served:
        monkeypatch.setattr(SGLangEngine, "lora_path", lambda self, model: None)
    model = make_model(tmp_path / "tiny-qwen3")
    policy = ModelPolicy(model)
    write_adapter(tmp_path / "adapter", random_adapter(policy.shapes, 1, rank=8, std=std))
    arguments = ["--adapter", tmp_path / "adapter", "--model", model, "--dir", tmp_path / "shared"]
    code, [server] = diagnose(capsys, start(policy=policy, shapes=policy.shapes).base_url, *arguments)
    is_young = status == "note"
    assert code == (0 if is_young or is_served else 1)
    found = words(server, status if is_young or is_served else "problem")
    assert found.keys() >= {"effect", "PEFT"}
    for name in ("effect", "PEFT"):
        assert ("shows nothing of the server: the adapter moves PEFT's own by 0.0000, and up to" in found[name]) == (
            is_young
        )


@pytest.mark.parametrize(
    ("args", "name", "said"),
    [
        ({"enable_lora": False}, "server", "Restart it with `trl-lora-sync serve sglang /models/tiny-qwen3 --port"),
        ({"dp_size": 2}, "server", "one URL each, with `trl-lora-sync serve sglang"),
        ({"tokenizer_worker_num": 2}, "server", "Restart it with `trl-lora-sync serve sglang"),
        ({"api_key": "secret"}, "server", "SGLANG_API_KEY"),
        ({"return_original_logprob": True}, "log-probabilities", "without SGLANG_RETURN_ORIGINAL_LOGPROB"),
        ({"max_lora_rank": 4}, "adapter", "--lora-rank 8"),
        ({"lora_target_modules": ("q_proj", "k_proj", "v_proj")}, "target modules", "--lora-target-modules q_proj"),
    ],
    ids=str,
)
def test_sick_server_is_told_with_the_flag_to_change(
    args: dict[str, Any],
    name: str,
    said: str,
    start: Start,
    adapter: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, [server] = diagnose(capsys, start(**args).base_url, "--adapter", adapter, "--dir", tmp_path / "shared")
    assert code == 1
    assert said in words(server, "problem")[name]


def test_server_that_cannot_be_used_still_says_what_it_is(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    _, [server] = diagnose(capsys, start(enable_lora=False, version="0.5.17").base_url)
    assert (server["engine"], server["version"]) == ("sglang", "0.5.17")


def test_rank_of_a_configuration_is_compared(start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"peft_type": "LORA", "r": 64, "target_modules": ["q_proj"]}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    code, [server] = diagnose(capsys, start().base_url, "--peft-config", tmp_path)
    assert code == 1
    assert (
        "Restart it with `trl-lora-sync serve sglang /models/tiny-qwen3 --lora-rank 64 --port"
        in words(server, "problem")["rank"]
    )


def test_feature_that_no_server_serves_is_a_problem(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "use_dora": True}))
    code, [server] = diagnose(capsys, start().base_url, "--peft-config", tmp_path)
    assert code == 1
    assert "DoRA" in words(server, "problem")["adapter features"]


def test_adapter_that_no_server_serves_is_a_problem(
    start: Start, adapter: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (adapter / "adapter_model.safetensors").write_bytes(b"broken")
    code, [server] = diagnose(capsys, start().base_url, "--adapter", adapter)
    assert code == 1
    assert "There is no adapter in" in words(server, "problem")["adapter features"]


@pytest.mark.parametrize(
    ("modules", "name", "said"),
    [
        (MODULES, "PEFT", "cannot be computed with PEFT: Error while deserializing header"),
        (["up_proj"], "adapter", "Give --model, a folder with the base model's safetensors files."),
    ],
)
def test_damaged_base_model_costs_its_comparison_and_no_other_finding(
    modules: Sequence[str],
    name: str,
    said: str,
    start: Start,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A pointer of Git LFS in the place of the weights ended the doctor in a traceback, without a report."""
    base_model().save_pretrained(tmp_path / "tiny-qwen3")
    (tmp_path / "tiny-qwen3" / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    write_adapter(tmp_path / "adapter", random_adapter(SMALL, 1, rank=8, modules=modules))
    arguments = ["--adapter", tmp_path / "adapter", "--model", tmp_path / "tiny-qwen3", "--dir", tmp_path / "shared"]
    code, servers = diagnose(capsys, start().base_url, start().base_url, *arguments)
    assert code == 0
    assert [said in words(server, "note")[name] for server in servers] == [True, True]


@pytest.mark.parametrize("content", [b"", b"version https://git-lfs.github.com/spec/v1\n", b"hello world"])
def test_damaged_base_model_in_the_form_of_torch_costs_its_comparison_as_well(
    content: bytes, start: Start, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only a damaged safetensors file did; this one ended the doctor in a traceback."""
    base_model().config.save_pretrained(tmp_path / "tiny-qwen3")
    (tmp_path / "tiny-qwen3" / "pytorch_model.bin").write_bytes(content)
    code, [server] = diagnose(
        capsys, start().base_url, "--adapter", adapter, "--model", tmp_path / "tiny-qwen3", "--dir", tmp_path / "shared"
    )
    assert code == 0
    assert "has a file of weights that is damaged" in words(server, "note")["PEFT"]


def test_servers_with_different_base_models_are_told_apart(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    same = [start(seed=0).base_url, start(seed=0).base_url]
    code, servers = diagnose(capsys, f"{same[0]}, {same[1]}/v1")  # as in vllm_server_base_url
    assert [server["url"] for server in servers] == same
    assert code == 0
    code, servers = diagnose(capsys, same[0], start(seed=1).base_url)
    assert code == 1
    assert not words(servers[0], "problem")
    assert "Serve the same model everywhere" in words(servers[1], "problem")["base model"]


def test_adapters_of_others_are_mentioned(
    start: Start, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from contract.served import engine_at, soon

    from trl_lora_sync.adapter.store import AdapterStore

    fake, store = start(), AdapterStore(tmp_path / "sync")
    engine = engine_at(fake.base_url, "sglang")
    engine.load(store.write(3, random_adapter(SMALL, 1, rank=8)), soon())
    code, [server] = diagnose(capsys, fake.base_url)
    assert code == 0
    said = words(server, "note")["loaded adapters"]
    assert f"{store.run_id}-v3" in said
    command = shlex.split(said.split("`")[1])
    assert main(command[1:]) == 0
    assert f"left {store.run_id}-v3" in capsys.readouterr().out
    engine.close()
    store.close()


def test_nobody_at_the_url_is_a_problem(capsys: pytest.CaptureFixture[str]) -> None:
    with nobody_listening() as url:
        started = time.monotonic()
        assert main(["doctor", url]) == 1
    assert time.monotonic() - started < 20  # the default --timeout is 30
    said = capsys.readouterr().out
    assert said.startswith(f"{url}: unknown server\n  problem server: No server accepts connections at {url} ")
    # A server that was started a moment ago looks the same.
    assert "Wait if it is still loading its model." in said
    # Without --python it ended, as this environment has no engine.
    port = url.rpartition(":")[2]
    assert f"`trl-lora-sync serve vllm MODEL --port {port} --python PATH/TO/vllm-env/bin/python`" in said


def test_command_that_starts_a_missing_server_listens_where_the_url_leads(capsys: pytest.CaptureFixture[str]) -> None:
    """It listened on 127.0.0.1 for every address of this host."""
    assert main(["doctor", "http://127.8.8.8:9", "--timeout", "0.5"]) == 1
    assert "`trl-lora-sync serve vllm MODEL --host 127.8.8.8 --port 9 " in capsys.readouterr().out


def test_command_that_starts_a_missing_server_names_model_and_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "base_model_name_or_path": "Qwen/Qwen3-0.6B"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with nobody_listening() as url:
        main(["doctor", url, "--peft-config", str(tmp_path), "--timeout", "0.5"])
    assert f"serve vllm Qwen/Qwen3-0.6B --peft-config {tmp_path} --port" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "content"), [(404, "what?"), (200, "<html>"), (200, '{"status": "ok"}')])
def test_server_of_something_else_is_a_problem(status: int, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The words were those for a trainer, with settings that the doctor has not."""

    def answer(request: Request) -> None:
        request.send(200 if request.path == "/health" else status, content)

    with serving(answer) as server:
        code, [found] = diagnose(capsys, server.url)
    assert code == 1
    assert found["engine"] is None
    assert words(found, "problem")["server"] == (
        f"{server.url} answers, but not as an inference server: /version answered HTTP {status} without a version, and "
        f"/server_info answered HTTP {status} without a version. Expected was a vLLM server or an SGLang server of "
        "0.5.11 or later. Correct the URL, or start a server at a free port with "
        "`trl-lora-sync serve vllm MODEL --port PORT --python PATH/TO/vllm-env/bin/python`."
    )


@pytest.mark.parametrize("status", [401, 403, 503])
def test_answer_that_tells_nothing_of_the_server_leaves_the_first_error(
    status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a gateway that wants a key for each route."""

    def answer(request: Request) -> None:
        request.send(200 if request.path == "/health" else status, "no")

    with serving(answer) as server:
        # It waits for a server that answers 503, for as long as it may.
        _, [found] = diagnose(capsys, server.url, "--timeout", 3)
    assert "not as an inference server" not in words(found, "problem")["server"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["localhost:8000"], "is not a URL"),
        (["http://localhost:8000,localhost:8001"], "'localhost:8001' is not a URL"),
        (["http://localhost:99999"], "'http://localhost:99999' is not a URL"),
        ([f"http://localhost:{'9' * 5000}"], "with a port from 1 to 65535"),
        (["http://localhost:0/v1"], "'http://localhost:0/v1' is not a URL"),
        (["http://user:password@localhost:8000"], "Give the key in the environment"),
        (["http://localhost:8000", "--peft-config", "/nonexistent"], "cannot be read"),
        (["http://localhost:8000", "--adapter", "/nonexistent"], "cannot be read"),
        (["http://localhost:8000", "--model", "/nonexistent"], "is not a folder"),
        (["http://localhost:8000", "--model", "/"], "--model / has no config.json"),
        (["http://localhost:8000", "--server-dir", "sync"], "--server-dir 'sync' is not an absolute path"),
        (["http://localhost:8000", "--timeout", "0"], "--timeout must be a positive, finite number of seconds, got 0"),
    ],
)
def test_what_cannot_be_understood_ends_with_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *arguments]) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert "password" not in captured.err.replace("user, password", "")


def test_report_for_people_has_a_line_for_each_finding(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    fake = start()
    assert main(["doctor", fake.base_url]) == 0
    captured = capsys.readouterr()
    heading, *lines = captured.out.splitlines()
    assert heading == f"{fake.base_url}: sglang 0.5.23, serving /models/tiny-qwen3"
    assert all(line.split()[0] in ("ok", "note", "problem") for line in lines)
    assert "checking" in captured.err


def test_doctor_imports_no_trl(run_python: Callable[..., str]) -> None:
    source = (
        "import sys\n"
        "from trl_lora_sync.cli.main import main\n"
        "main(['doctor', sys.argv[1], '--timeout', '0.2', '--json'])\n"
        "print(sorted({'trl', 'peft', 'transformers', 'accelerate'} & set(sys.modules)))"
    )
    with nobody_listening() as url:
        assert run_python(source, url).splitlines()[-1] == "[]"


def test_initialisation_that_changes_the_base_needs_twice_the_rank(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = {"peft_type": "LORA", "r": 8, "target_modules": ["q_proj"], "init_lora_weights": "olora"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(saved))
    code, [server] = diagnose(capsys, start(max_lora_rank=8).base_url, "--peft-config", tmp_path)
    assert code == 1
    assert "twice the rank" in words(server, "ok")["adapter features"]
    assert "reserves 8, and the adapter has 16. Restart it with" in words(server, "problem")["rank"]
    assert "--lora-rank 16" in words(server, "problem")["rank"]


def finding(
    check_name: str,
    served: Capabilities,
    expected: Expected,
    *,
    frees_kv_cache: bool = False,
    sends_content: bool = False,
    store: Any = None,
) -> Finding | None:
    """What one check finds of a server that is none, and so takes no load."""
    url = "http://localhost:8000"
    server: Any = SimpleNamespace(
        base_url=url,
        engine=SimpleNamespace(base_url=url, capabilities=served),
        settings=SimpleNamespace(frees_kv_cache=frees_kv_cache),
        sends_content=sends_content,
        address=ServerAddress(base_url=url, is_local=True),
    )
    [check] = [check for check in CHECKS if check.name == check_name]
    return run_on_loop(check(Subject(server, expected, store), soon()))


def test_a_restart_command_has_what_the_run_needs_and_vllm_does_not_report() -> None:
    """A server that was started by it had rank 16, and was refused at the next start."""
    served = replace(CAPABILITIES, max_lora_rank=None, supports_push=True, logprobs_mode="raw_logprobs")
    found = finding("log-probabilities", served, Expected(rank=64), frees_kv_cache=True, sends_content=True)
    assert found is not None
    assert f"trl-lora-sync serve vllm {served.base_root} --lora-rank 64 --push --sleep" in found.message


@pytest.mark.parametrize(
    ("reserved", "status", "words"),
    [(None, "note", "not checked"), (64, "ok", "64 fits the 64 that the server reserves")],
)
def test_a_rank_that_the_server_does_not_report_is_not_found_out_by_a_load(
    reserved: int | None, status: str, words: str
) -> None:
    """An adapter of rank 1000000 was sent to be refused, which left answers behind in vLLM with several workers."""
    served = replace(CAPABILITIES, max_lora_rank=reserved)
    found = finding("rank", served, Expected(rank=64), store=object())
    assert found is not None
    assert (found.status, found.message.partition(":")[0]) == (status, words)


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        (("GPU-1", "GPU-0"), ["GPU-0"], ("ok", "sees every GPU")),
        (
            ("GPU-1",),
            ["GPU-0", "GPU-1"],
            ("note", r"does not see GPU-0\..*trl-lora-sync serve vllm.*CUDA_VISIBLE_DEVICES"),
        ),
        ((), ["GPU-0"], None),
        (("GPU-1",), [], None),
    ],
)
def test_a_gpu_that_the_server_does_not_see_is_named(
    theirs: tuple[str, ...], ours: list[str], expected: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ipc, "visible_gpus", lambda: ours)
    found = finding("GPU to GPU", replace(CAPABILITIES, gpus=theirs), Expected())
    assert (found is None) == (expected is None)
    if found and expected:
        assert found.status == expected[0]
        assert re.search(expected[1], found.message)
