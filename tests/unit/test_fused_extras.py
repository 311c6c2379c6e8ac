"""Unit tier: what fused serving computes of an adapter that is more than LoRA on linear layers, against PEFT itself.

The base is a Transformers model whose loading rule is a plain copy; `live/test_fused.py` has vLLM's.
"""

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from operator import is_
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save, save_file
from torch import Tensor, nn
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
)

from trl_lora_sync.adapter.canonical import widened
from trl_lora_sync.adapter.export import AdapterReader, remember_initial_adapter
from trl_lora_sync.adapter.extras import neutral_extras, trial_extras
from trl_lora_sync.adapter.store import write_adapter
from trl_lora_sync.adapter.support import check_model, supported_features
from trl_lora_sync.engine_plugins.fused_file import AdapterFileError, read_head
from trl_lora_sync.engine_plugins.fused_placement import trace_weight_slices
from trl_lora_sync.engine_plugins.fused_weights import InPlace, Reader, Target, fuse
from trl_lora_sync.engine_plugins.safetensors_file import bytes_of
from trl_lora_sync.errors import AdapterNotFiniteError, UnsupportedAdapterError, UnsupportedSettingError
from trl_lora_sync.generation import base
from trl_lora_sync.generation.scoring import computing_with, trial_weights
from trl_lora_sync.generation.server import LoRASyncGeneration

from .tiny import VOCABULARY, logits

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]
KINDS: dict[str, dict[str, Any]] = {
    "DoRA": {"use_dora": True},
    "DoRA with the output head": {"use_dora": True, "target_modules": [*LINEAR, "lm_head"]},
    "DoRA and PiSSA": {"use_dora": True, "init_lora_weights": "pissa"},
    "lora_bias": {"lora_bias": True, "target_modules": ["q_proj", "v_proj", "o_proj"]},
    "output head": {"modules_to_save": ["lm_head"]},
    "embedding and norm": {"modules_to_save": ["embed_tokens", "norm"]},
    "LoRA on the embedding": {"target_modules": [*LINEAR, "embed_tokens"], "use_rslora": True},
    "LoRA on the output head": {"target_modules": [*LINEAR, "lm_head"]},
    "tokens": {"trainable_token_indices": [9, 1, 30]},
    "tokens of a tied model": {"trainable_token_indices": [9, 1, 30], "tied": True},
    "all of it": {
        "use_dora": True,
        "modules_to_save": ["norm", "lm_head"],
        "trainable_token_indices": {"embed_tokens": [5, 7]},
    },
}


def base_model(*, tied: bool = False) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            initializer_range=0.3,
            tie_word_embeddings=tied,
            attention_bias=True,
        )
        return LlamaForCausalLM(config).eval()


def trained_model(*, tied: bool = False, **lora: Any) -> Any:
    """With everything that the adapter trains moved away from where it began."""
    settings = {"r": 2, "lora_alpha": 3, "target_modules": LINEAR, "task_type": "CAUSAL_LM"} | lora
    model = get_peft_model(base_model(tied=tied), LoraConfig(**settings)).eval()
    if lora.get("init_lora_weights") == "pissa":
        remember_initial_adapter(model, is_new=True, serving="fused")
    move(model)
    return model


def move(model: nn.Module) -> None:
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=random) * 0.2)


class Served:
    """The base model as a server that adapters are fused into."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.weights = {name.removesuffix(".weight"): one.data for name, one in model.named_parameters()}
        self.before = {name: one.clone() for name, one in self.weights.items()}
        self.pieces: dict[str, Any] = {}
        self.targets: dict[str, Target] = {}

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, source in weights:
            self.model.get_parameter(name).data.copy_(source)

    def fuse(self, folder: Path) -> None:
        file = read_head(str(folder))
        self.pieces |= trace_weight_slices(self.load, self.weights, file.shapes(), torch.float32)
        for owner in {piece.owner for pieces in self.pieces.values() for piece in pieces}:
            self.targets.setdefault(owner, InPlace(self.weights[owner], self.before[owner]))
        fuse(Reader(torch.device("cpu")).read("a", file), self.targets, self.pieces)

    def is_base(self) -> bool:
        return all(torch.equal(self.weights[name], self.before[name]) for name in self.weights)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write_one(model: Any, name: str = "adapter", dtype: torch.dtype = torch.float32) -> Path:
        reader = AdapterReader("fused")
        reader.linears(model)
        write_adapter(tmp_path / name, reader.read(model, dtype=dtype))
        return tmp_path / name

    return write_one


def test_the_fused_weights_compute_what_peft_computes_and_the_base_comes_back(
    kind: dict[str, Any], write: Write
) -> None:
    model, served = trained_model(**kind), Served(base_model(tied=kind.get("tied", False)))
    served.fuse(write(model))
    assert (logits(served.model) - logits(model)).abs().max() < 2e-5
    assert (logits(served.model) - logits(base_model(tied=kind.get("tied", False)))).abs().max() > 0.1
    fuse(None, served.targets, served.pieces)
    assert served.is_base()


def test_the_base_comes_back_after_many_versions_of_different_kinds(write: Write) -> None:
    served = Served(base_model())
    for index, kind in enumerate(("DoRA", "lora_bias", "output head", "LoRA on the embedding", "tokens")):
        model = trained_model(**KINDS[kind])
        served.fuse(write(model, f"v{index}"))
        assert (logits(served.model) - logits(model)).abs().max() < 2e-5
    fuse(None, served.targets, served.pieces)
    assert served.is_base()


def test_tokens_of_a_tied_model_are_served_beside_a_norm_that_is_saved(write: Write) -> None:
    """The tokens were taken for a saved embedding, and the adapter was refused because the model ties it."""
    model = trained_model(trainable_token_indices=[9, 1, 30], modules_to_save=["norm"], tied=True)
    served = Served(base_model(tied=True))
    served.fuse(write(model))
    assert (logits(served.model) - logits(model)).abs().max() < 2e-5


def test_what_is_neutral_is_the_base_and_a_trial_is_computed_alike(kind: dict[str, Any], write: Write) -> None:
    """The trial adapters at the start prove what a server does with each of these."""
    model, tied = trained_model(**kind), kind.get("tied", False)
    reader = AdapterReader("fused")
    linears = reader.linears(model)
    initial = remember_initial_adapter(model, is_new=True, serving="fused")
    none: dict[Any, Any] = {**(initial or dict.fromkeys(linears[1::2])), **neutral_extras(reader.extras)}
    before = {name: one.clone() for name, one in model.state_dict().items()}
    found = computing_with(none, lambda: logits(model))
    assert (found - logits(base_model(tied=tied))).abs().max() < 1e-5

    weights = initial or {one: torch.zeros_like(one.weight) for one in linears}
    trial: dict[Any, Tensor] = {
        **weights,
        **neutral_extras(reader.extras),
        **trial_extras(reader.extras, 0.5, torch.device("cpu")),
    }
    served = Served(base_model(tied=tied))
    folder = write(model)
    adapter = reader.read_trial(model, trial, dtype=torch.float32)
    write_adapter(folder.parent / "trial", adapter)
    served.fuse(folder.parent / "trial")
    expected = computing_with(trial, lambda: logits(model))
    assert (logits(served.model) - expected).abs().max() < 2e-5
    if any(one.trial_size for one in reader.extras):
        assert (expected - logits(base_model(tied=tied))).abs().max() > 0.05
    assert all(torch.equal(one, model.state_dict()[name]) for name, one in before.items())


def test_a_trial_adapter_is_the_same_before_and_after_the_training(kind: dict[str, Any]) -> None:
    """A restarted server was refused, as its trial held trained values, which the scores of the start did not fit."""
    model, reader, cpu = trained_model(**kind), AdapterReader("fused"), torch.device("cpu")

    def trial() -> dict[str, Tensor]:
        linears = reader.linears(model)
        extras = neutral_extras(reader.extras) | trial_extras(reader.extras, 0.5, cpu)
        weights: dict[Any, Tensor] = {**trial_weights(linears, 0.5, cpu), **extras}
        return dict(reader.read_trial(model, weights, dtype=torch.float32).on_host().tensors)

    first = trial()
    move(model)
    again = trial()
    assert first.keys() == again.keys()
    assert all(torch.equal(one, again[key]) for key, one in first.items())


def test_a_magnitude_keeps_its_digits_in_bfloat16(write: Write) -> None:
    model = trained_model(use_dora=True)
    folder = write(model, dtype=torch.bfloat16)
    found = load_file(folder / "adapter_model.safetensors")
    key = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"
    assert found[key].dtype == torch.bfloat16
    magnitude = model.base_model.model.model.layers[0].self_attn.q_proj.lora_magnitude_vector["default"].weight
    assert ((found[key].float().sum(0) - magnitude) / magnitude).abs().max() < 2**-15


def test_extras_follow_the_matrices_in_one_flat_file() -> None:
    model = trained_model(**KINDS["all of it"])
    reader = AdapterReader("fused")
    reader.linears(model)
    first = reader.read(model, dtype=torch.bfloat16).on_host()
    adapter = reader.read(model, dtype=torch.bfloat16)
    assert adapter.header + bytes_of(adapter.flat).tobytes() == save(first.tensors, metadata={"format": "pt"})
    assert (adapter.tokens, adapter.config()) == (first.tokens, first.config())
    assert all(".lora_" in key for key in widened(adapter).tensors)


def test_what_was_replaced_since_it_was_found_is_read_as_it_is(kind: dict[str, Any]) -> None:
    """The server sampled from the old magnitudes after `load_state_dict(assign=True)`, and from an old scaling."""
    model, reader, fresh = trained_model(**kind), AdapterReader("fused"), AdapterReader("fused")
    reader.linears(model)
    reader.read(model, dtype=torch.float32)
    trained = {name: one.detach() + 0.1 for name, one in model.named_parameters() if one.requires_grad}
    model.load_state_dict(trained, assign=True, strict=False)
    for module in model.modules():
        if hasattr(module, "set_scale"):
            module.set_scale("default", 4.0)
    for one in (reader, fresh):
        one.linears(model)
    assert all(map(is_, (one.parameter for one in reader.extras), (one.parameter for one in fresh.extras)))
    found, expected = (one.read(model, dtype=torch.float32).tensors for one in (reader, fresh))
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[key]) for key, tensor in found.items())


def test_a_module_that_is_not_finite_is_named() -> None:
    model = trained_model(modules_to_save=["norm"])
    reader = AdapterReader("fused")
    reader.linears(model)
    reader.extras[0].parameter.data[0] = float("nan")
    with pytest.raises(AdapterNotFiniteError, match=r"norm\.weight' holds NaN"):
        reader.read(model, dtype=torch.float32)


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": [*LINEAR, "lm_head"], "tied": True}, "ties both.*trainable_token_indices"),
        ({"modules_to_save": ["lm_head"], "tied": True}, "ties both"),
        ({"lora_bias": True, "target_modules": ["q_proj", "down_proj"]}, r"down_proj.*the layer has no bias"),
        ({"use_dora": True, "target_modules": ["q_proj", "embed_tokens"]}, "scales the columns"),
        ({"use_dora": True, "target_modules": r".*\.(q_proj|embed_tokens)"}, "scales the columns"),
        ({"target_modules": ["embed_tokens"]}, "One linear layer is needed at least"),
    ],
)
def test_what_the_servers_weights_cannot_be_is_refused(lora: dict[str, Any], words: str) -> None:
    model = trained_model(**lora)
    with pytest.raises(UnsupportedAdapterError, match=words):
        AdapterReader("fused").linears(model)


@pytest.mark.parametrize(
    "lora",
    [
        {"target_modules": ["query_key_value", "word_embeddings"]},
        {"target_modules": ["query_key_value"], "modules_to_save": ["word_embeddings"]},
    ],
)
def test_a_tied_embedding_is_found_by_what_the_model_uses_it_for(lora: dict[str, Any]) -> None:
    """Under a name that is not Llama's, PEFT trained the embedding alone and the server changed the head as well."""
    config = BloomConfig(vocab_size=VOCABULARY, hidden_size=16, n_layer=2, n_head=2)
    tied = get_peft_model(BloomForCausalLM(config), LoraConfig(**lora, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedAdapterError, match="ties both"):
        AdapterReader("fused").linears(tied)


@pytest.mark.parametrize("targets", [["c_attn"], ["c_attn", "lm_head"]])
@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_weights_that_are_kept_transposed_are_refused_before_any_version_is(targets: list[str]) -> None:
    """The server refused each version, with the advice to export what `export_adapter` had written."""
    base = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=16, n_layer=1, n_head=2, tie_word_embeddings=False))
    model = get_peft_model(base, LoraConfig(target_modules=targets, task_type="CAUSAL_LM"))
    with pytest.raises(UnsupportedAdapterError, match=r'c_attn.*fan_in_fan_out.*lora_sync_serving="runtime"'):
        AdapterReader("fused").linears(model)
    assert supported_features("fused")["fan_in_fan_out"].startswith("not on Conv1D")


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
def test_fan_in_fan_out_on_linear_layers_is_served(write: Write) -> None:
    """PEFT takes it back there, so an adapter of a Llama is served whatever its configuration had."""
    model, served = trained_model(fan_in_fan_out=True), Served(base_model())
    served.fuse(write(model))
    assert (logits(served.model) - logits(model)).abs().max() < 2e-5


@pytest.mark.parametrize("name", [name for name in KINDS if name != "DoRA and PiSSA"])
def test_at_run_time_all_of_it_is_refused_and_the_error_names_fused_serving(name: str) -> None:
    kind = {key: value for key, value in KINDS[name].items() if key != "tied"}
    config = LoraConfig(**{"target_modules": LINEAR, "task_type": "CAUSAL_LM"} | kind)
    check_model(base_model(), config, "fused")
    with pytest.raises(UnsupportedAdapterError, match='lora_sync_serving="fused"'):
        check_model(base_model(), config)


def test_a_sharded_model_with_more_than_matrices_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for is_sharded in (False, True):
        monkeypatch.setattr(base, "is_sharded", lambda model, answer=is_sharded: answer)
        generation = LoRASyncGeneration.__new__(LoRASyncGeneration)
        generation.model, generation.reader = trained_model(use_dora=True), AdapterReader("fused")
        generation.accelerator = Accelerator(cpu=True)
        with pytest.raises(UnsupportedSettingError, match="Use DDP or ZeRO-2") if is_sharded else nullcontext():
            generation.linears()


def damaged(change: Callable[[dict[str, Tensor]], None], folder: Path) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


def shorter(tensors: dict[str, Tensor], key: str) -> None:
    tensors[key] = tensors[key][:, :-1].contiguous()


TOKENS = "base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta"
MAGNITUDE = "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.update({TOKENS: tensors[TOKENS][:1].contiguous()}), "lists others"),
        (lambda tensors: tensors.pop(TOKENS), "lists others"),
        (lambda tensors: shorter(tensors, MAGNITUDE), "magnitudes of .*q_proj' do not belong"),
        (lambda tensors: tensors.update({"base_model.model.x.strange": torch.ones(2)}), "does not know"),
        (lambda tensors: tensors[TOKENS].fill_(float("inf")), "NaN or infinity, in model.embed_tokens.weight"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    change: Callable[[dict[str, Tensor]], None], words: str, write: Write
) -> None:
    folder = write(trained_model(**KINDS["all of it"]))
    damaged(change, folder)
    with pytest.raises(AdapterFileError, match=words):
        Served(base_model()).fuse(folder)
