"""Keys that are never shown, certificates that are always verified, and server words that are never paths."""

import copy
import json
import logging
import os
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import trustme

from trl_lora_sync.config import GRPOConfig, sync_settings
from trl_lora_sync.engines.base import Deadline
from trl_lora_sync.engines.connect import connect_engine
from trl_lora_sync.engines.http import APIKey, HTTPClient, may_have_acted
from trl_lora_sync.engines.sglang.engine import SGLangEngine
from trl_lora_sync.engines.vllm.engine import VLLMEngine
from trl_lora_sync.errors import (
    LoRASyncError,
    ServerAuthError,
    ServerSetupError,
    ServerUnreachableError,
    UnsupportedSettingError,
)
from trl_lora_sync.runtime import Blocking, run
from trl_lora_sync.sync import AdapterSync
from unit.servers import Request, Server, serving

pytestmark = pytest.mark.outside

SECRET = "sk-a-secret-that-must-not-show"
KEYS = ("VLLM_API_KEY", "SGLANG_API_KEY", "SGLANG_ADMIN_API_KEY")
TESTS = Path(__file__).parents[1]


def soon(seconds: float = 20.0) -> Deadline:
    return Deadline.after(seconds, "The test")


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in KEYS:
        monkeypatch.setenv(name, SECRET)


def config(tmp_path: Path, url: str = "http://127.0.0.1:8000", **changes: Any) -> GRPOConfig:
    wanted = {"use_vllm": True, "vllm_mode": "server", "vllm_sync_strategy": "lora_adapter"}
    plain = {"output_dir": str(tmp_path), "use_cpu": True, "bf16": False, "report_to": "none"}
    return GRPOConfig(**plain, **wanted, vllm_server_base_url=url, **changes)


# Keys


def everything_shown(thing: Any) -> str:
    """What an object shows of itself when it is printed, saved, or dumped by a debugger."""
    shown = [repr(thing), str(thing), repr(getattr(thing, "__dict__", ""))]
    try:
        shown.append(repr(pickle.dumps(thing)))
    except Exception as error:  # what does not pickle shows nothing that way
        shown.append(repr(error))
    return " ".join(shown)


def test_the_key_is_in_no_repr_and_no_pickle_of_configuration_settings_sync_and_clients(
    keys: None, tmp_path: Path
) -> None:
    args = config(tmp_path)
    settings = sync_settings(args)
    made = [
        args,
        settings,
        AdapterSync(settings),
        APIKey("VLLM_API_KEY"),
        Blocking(HTTPClient("http://127.0.0.1:1", api_key=APIKey("VLLM_API_KEY"), is_local=True)),
        Blocking(VLLMEngine("http://127.0.0.1:1", is_local=True)),
        Blocking(SGLangEngine("http://127.0.0.1:1", is_local=True)),
    ]
    for thing in made:
        assert SECRET not in everything_shown(thing), type(thing)
        for inner in getattr(thing, "__dict__", {}).values():
            assert SECRET not in everything_shown(inner), type(inner)
    assert SECRET not in args.to_json_string()
    assert SECRET not in json.dumps({field.name: str(getattr(args, field.name)) for field in fields(args)})


def test_no_field_of_the_configuration_is_for_a_key() -> None:
    names = {field.name for field in fields(GRPOConfig) if field.name.startswith(("vllm_server", "lora_sync"))}
    assert not [name for name in names if "key" in name or "token" in name or "password" in name]


@pytest.mark.parametrize(
    "answer",
    [
        lambda request: request.send(401, "who are you"),
        lambda request: request.send(500, {"error": {"message": f"got {request.headers['Authorization']}"}}),
        lambda request: request.send(400, f"you sent {dict(request.headers)}"),
        lambda request: request.send(200, f"<html>{request.headers['Authorization']}</html>"),
        Request.reset,
    ],
    ids=["unauthorized", "repeated in JSON", "repeated as text", "repeated as a page", "reset"],
)
@pytest.mark.parametrize("engine", ["vllm", "sglang", "auto"])
def test_the_key_is_in_no_error_and_no_log_whatever_the_server_answers(
    answer: Callable[[Request], None], engine: str, keys: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)

    with serving(answer) as server, pytest.raises(LoRASyncError) as caught:
        Blocking(run(connect_engine(server.url, engine=engine, is_local=True, deadline=soon(1.0))))

    chain: BaseException | None = caught.value
    while chain is not None:
        assert SECRET not in everything_shown(chain)
        chain = chain.__cause__
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in repr(pickle.loads(pickle.dumps(caught.value)))
    assert caplog.records, "nothing was logged, so nothing is shown by this"
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    "key",
    [f"{SECRET}\n", f" {SECRET}", f"{SECRET}\n{SECRET}", f"{SECRET}\u00e9"],
    ids=["line break", "blank", "two lines", "not ASCII"],
)
@pytest.mark.parametrize(("engine", "variable"), [("vllm", "VLLM_API_KEY"), ("sglang", "SGLANG_API_KEY")])
def test_a_key_that_no_header_can_carry_is_refused_unseen_by_the_name_of_its_variable(
    key: str, engine: str, variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """h11 quoted such a key in its error, which became the text of ours; the request was repeated as well."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv(variable, key)

    with serving(lambda request: request.send()) as server, pytest.raises(ServerAuthError, match=variable) as caught:
        Blocking(run(connect_engine(server.url, engine=engine, is_local=True, deadline=soon())))

    assert {request.path for request in server.requests} <= {"/health"}
    assert SECRET not in everything_shown(caught.value)
    assert SECRET not in "".join(traceback.format_exception(caught.value))
    assert SECRET not in caplog.text


@pytest.mark.parametrize("user", [f"user:{SECRET}", SECRET])
def test_a_password_in_the_url_is_refused_unseen_at_construction_and_later(user: str, tmp_path: Path) -> None:
    url = f"http://{user}@127.0.0.1:8000"
    changed = copy.copy(config(tmp_path))
    changed.vllm_server_base_url = url

    for attempt in (lambda: config(tmp_path, url), lambda: sync_settings(changed)):
        with pytest.raises(UnsupportedSettingError, match="Give the plain URL") as caught:
            attempt()
        assert SECRET not in everything_shown(caught.value)
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_redirect_does_not_carry_the_key_to_another_host(keys: None) -> None:
    with (
        serving(lambda request: request.send(200, {"data": []})) as other,
        serving(lambda request: request.send(307, "", location=other.url + request.path)) as server,
        pytest.raises(LoRASyncError),
    ):
        Blocking(run(connect_engine(server.url, engine="vllm", is_local=True, deadline=soon())))
    assert server.requests
    assert other.requests == []


# TLS


@pytest.fixture(autouse=True)
def no_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """The authorities of the user who runs the tests reach none of them."""
    for name in ("SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def tls_server(authority: trustme.CA) -> Iterator[Server]:
    """Speaks TLS with a certificate for 127.0.0.1 and localhost that `authority` signed."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    with serving(lambda request: request.send(200, {"version": "0.31.0"})) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        server.url = server.url.replace("http://", "https://")
        yield server


def ask(url: str, seconds: float = 20.0) -> int:
    client = Blocking(HTTPClient(url, api_key=APIKey("VLLM_API_KEY"), is_local=True))
    try:
        return client.request("GET", "/version", soon(seconds)).status_code
    finally:
        client.close()


def test_a_certificate_of_an_unknown_authority_is_refused_with_what_to_do(tls_server: Server) -> None:
    with pytest.raises(ServerSetupError, match=r"is not trusted: .*SSL_CERT_FILE=/path/to/ca\.pem"):
        ask(tls_server.url)
    assert tls_server.requests == []


def test_an_unknown_authority_is_reported_at_once_and_not_waited_for(tls_server: Server) -> None:
    """It was taken for a server that is not up yet, and tried again until vllm_server_timeout was over."""
    deadline = soon(120.0)
    with pytest.raises(ServerSetupError, match="is not trusted"):
        Blocking(run(connect_engine(tls_server.url, engine="vllm", is_local=True, deadline=deadline)))
    assert deadline.left_s() > 60


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE"])
def test_an_authority_of_ones_own_is_accepted(
    variable: str, tls_server: Server, authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ca.pem"
    authority.cert_pem.write_to_path(str(file))
    if variable == "SSL_CERT_DIR":
        subprocess.run(["openssl", "rehash", str(tmp_path)], check=True, capture_output=True)
    monkeypatch.setenv(variable, str(tmp_path if variable == "SSL_CERT_DIR" else file))

    assert ask(tls_server.url) == 200


def trusted_context(authority: trustme.CA, folder: Path, patch: pytest.MonkeyPatch, host: str = "127.0.0.1") -> Any:
    """Of a server with a certificate for `host` by an authority that the client trusts."""
    import ssl

    authority.cert_pem.write_to_path(str(folder / "ca.pem"))
    patch.setenv("SSL_CERT_FILE", str(folder / "ca.pem"))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(host).configure_cert(context)
    return context


def test_a_certificate_for_another_host_is_refused(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = trusted_context(authority, tmp_path, monkeypatch, "elsewhere.example")
    with serving(lambda request: request.send(200)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with pytest.raises(ServerSetupError, match=r"is not trusted: .*correct vllm_server_base_url"):
            ask(server.url.replace("http://", "https://"))


def test_a_server_without_tls_behind_an_https_url_is_told_apart() -> None:
    with serving(lambda request: request.send(200)) as server, pytest.raises(ServerSetupError, match="in TLS"):
        ask(server.url.replace("http://", "https://"))


def test_a_server_that_requires_a_client_certificate_is_refused_with_what_to_do(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alert after the handshake, which was a raw SSLError."""
    import ssl

    context = trusted_context(authority, tmp_path, monkeypatch)
    authority.configure_trust(context)
    context.verify_mode = ssl.CERT_REQUIRED
    with serving(lambda request: request.send(200)) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http://", "https://")
        with pytest.raises(ServerSetupError, match=r"requires a client certificate.*vllm_server_base_url"):
            Blocking(run(connect_engine(url, engine="vllm", is_local=True, deadline=soon())))


def test_an_answer_that_is_no_tls_after_the_handshake_is_a_broken_connection(
    authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = trusted_context(authority, tmp_path, monkeypatch)

    def answer(request: Request) -> None:
        os.write(request.connection.fileno(), b"no TLS at all")

    with serving(answer) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        with pytest.raises(ServerUnreachableError, match=r"broke during GET /version \(\[SSL") as found:
            ask(server.url.replace("http://", "https://"))
    assert may_have_acted(found.value)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_authorities_that_cannot_be_read_are_an_error_that_names_the_variable(
    variable: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv(variable, str(tmp_path / "missing.pem"))
    with pytest.raises(ServerSetupError, match=f"in {variable} cannot"):
        ask("https://127.0.0.1:1")


# Server words


HOSTILE = "/tmp/../../hostile-marker/etc/passwd"


def hostile(request: Request) -> None:
    """Everything that a vLLM server may name is a path that must never be touched."""
    loaded = [r.body["lora_name"] for r in request.server.requests if r.path.endswith("/load_lora_adapter")]
    match request.path:
        case "/version":
            request.send(200, {"version": HOSTILE})
        case "/v1/models":
            base = {"id": HOSTILE, "root": HOSTILE, "parent": None, "max_model_len": 64}
            others = [{"id": HOSTILE + name, "root": HOSTILE, "parent": HOSTILE} for name in loaded]
            request.send(200, {"data": [base, *others]})
        case "/v1/load_lora_adapter" if not request.body["lora_path"]:
            request.send(400, {"error": {"message": "Both 'lora_name' and 'lora_path' must be provided."}})
        case "/v1/load_lora_adapter":
            request.send(404, {"error": {"message": f"No adapter found for {HOSTILE}"}})
        case _:
            request.send(200, {"model": HOSTILE, "choices": [{"text": HOSTILE}], "id": HOSTILE})


WATCHED = """
import sys
touched = []
def watch(event, arguments):
    if event.split(".")[0] in ("open", "os", "shutil", "glob", "subprocess", "pathlib", "tempfile"):
        touched.append((event, repr(arguments)))
sys.path[:0] = [sys.argv[3]]
from pathlib import Path
import support.run_until_killed as script
sys.addaudithook(watch)
try:
    script.main(sys.argv[1], sys.argv[2])
except Exception as error:
    print("raised", type(error).__name__)
assert touched, "nothing was watched"
print([entry for entry in touched if "hostile-marker" in entry[1]])
"""


def test_nothing_that_a_server_says_is_opened_as_a_path(tmp_path: Path) -> None:
    """Watched with an audit hook, which sees every file that Python touches."""
    with serving(hostile) as server:
        done = subprocess.run(
            [sys.executable, "-c", WATCHED, server.url, str(tmp_path / "sync"), str(TESTS)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert any(r.path == "/v1/load_lora_adapter" for r in server.requests)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] in (["raised GenerationError", "[]"], ["raised AdapterNotVisibleError", "[]"])
