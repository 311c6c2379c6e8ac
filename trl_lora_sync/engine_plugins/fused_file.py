"""What an adapter's folder holds, by its configuration and the head of its safetensors file; reads no tensors.

Takes plain LoRA, and what the trainer writes beside it (`adapter.extras`):

    X.lora_A.weight, X.lora_B.weight          scaling * lora_B @ lora_A is added to X.weight
    X.lora_magnitude_vector.weight            (2, out_features), added up: the norms of the rows of that sum, for DoRA
    X.lora_B.bias                             is added to X.bias
    X.weight, X.bias                          replaces X.weight or X.bias
    X.token_adapter.trainable_tokens_delta    replaces the rows of X.weight that the configuration lists

Everything else is refused here, before any weight is touched.
"""

import errno
import json
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trl_lora_sync.engine_plugins.safetensors_file import (
    CONFIG_FILE,
    CUT_OFF,
    MALFORMED,
    TENSORS_FILE,
    Head,
    TensorSpan,
    head_of,
)
from trl_lora_sync.engine_plugins.version_note import NOTE_FILE, VersionNote, is_noted

_PREFIX = "base_model.model."
TOKENS_KEY = "lora_sync_tokens"
"""In the configuration: the number of rows of each embedding of which some are replaced, and which ones."""
Kind = Literal["value", "added", "rows"]
# Fields of the configuration that change what is computed; with these values they change nothing.
# Source: peft/tuners/lora/config.py (0.21).
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "fan_in_fan_out": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "trainable_token_indices": (None, []),
    "target_parameters": (None, []),
    "alora_invocation_tokens": (None, []),
    "use_qalora": (False, None),
}


class AdapterFileError(Exception):
    """An adapter that cannot be fused.

    Attributes:
        is_missing: whether there is no adapter at all.
    """

    def __init__(self, message: str, *, is_missing: bool = False) -> None:
        super().__init__(message)
        self.is_missing = is_missing


@dataclass(frozen=True, kw_only=True)
class AdapterFile:
    """One adapter on disk.

    Attributes:
        head: which region of the file holds all tensors.
        content: what the tensors are; the same object for every file with the same header.
        scaling: what `lora_B @ lora_A` is multiplied with.
        tokens: for each tensor of which some rows are replaced, how many it has and which ones.
        config: the file `adapter_config.json`.
        note: what its trainer has noted of it, if it has.
    """

    file: Path
    head: Head
    content: "Content"
    scaling: float
    tokens: dict[str, tuple[int, list[int]]]
    config: bytes
    note: VersionNote | None

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape in the checkpoint of everything that changes, by `tensor_name`'s argument."""
        modules = self.content.modules.items()
        shapes: dict[str, tuple[int, ...]] = {name: (b.shape[0], a.shape[1]) for name, (a, b) in modules}
        for name, (kind, span) in self.content.tensors.items():
            shapes[name] = (self.tokens[name][0], span.shape[1]) if kind == "rows" else span.shape
        return shapes


class Content(NamedTuple):
    """The tensors of a file.

    Attributes:
        modules: lora_A `(r, in_features)` and lora_B `(out_features, r)` by the module's name in the checkpoint.
        magnitudes: of DoRA, `(2, out_features)`, for some of the modules.
        tensors: what happens to other tensors, by their names in the checkpoint.
    """

    modules: dict[str, tuple[TensorSpan, TensorSpan]]
    magnitudes: dict[str, TensorSpan]
    tensors: dict[str, tuple[Kind, TensorSpan]]


def read_head(folder: str) -> AdapterFile:
    """What is in `folder`.

    Raises:
        AdapterFileError: the folder holds no adapter, or an adapter that is not a plain LoRA.
    """
    root = Path(folder)
    try:
        text = (root / CONFIG_FILE).read_bytes()
        config = json.loads(text)
        file = root / TENSORS_FILE
        with file.open("rb", buffering=0) as opened:
            head = head_of(opened.fileno())
        scaling = _scaling_of(config)
        content = _content_of(head)
        tokens = _tokens_in(config, content)
        note = VersionNote.read(root)
        if note is None and is_noted(config):
            raise FileNotFoundError(errno.ENOENT, "does not show yet", str(root / NOTE_FILE))
    # A missing adapter is answered with 404, by which `FusedMiddleware` knows that a registered version is gone.
    except FileNotFoundError as error:
        message = f"No adapter found for {folder} ({error.strerror}: {error.filename})"
        raise AdapterFileError(message, is_missing=True) from error
    except OSError as error:
        raise AdapterFileError(f"{folder} cannot be read ({error.strerror})") from error
    except MALFORMED as error:
        raise AdapterFileError(
            f"{folder} holds no adapter that can be read ({type(error).__name__}: {error}). It is damaged, or was "
            f"{CUT_OFF}."
        ) from error
    return AdapterFile(
        file=file,
        head=head,
        content=content,
        scaling=scaling,
        tokens=tokens,
        config=text,
        note=note,
    )


def _scaling_of(config: dict[str, Any]) -> float:
    # A field that is missing has PEFT's default, which is plain for each of these.
    strange = {name: config[name] for name, plain in _PLAIN.items() if name in config and config[name] not in plain}
    if strange:
        raise AdapterFileError(
            f"The adapter is not a plain LoRA: its configuration has {strange}. Fused serving adds scaling * lora_B "
            "@ lora_A and nothing else; export the adapter with trl_lora_sync.export_adapter."
        )
    rank, alpha = float(config["r"]), float(config["lora_alpha"])
    # `json` reads NaN and Infinity as numbers, which would go into the weights.
    if not (1 <= rank < inf and isfinite(alpha)):
        raise AdapterFileError(
            f"The adapter's configuration has r={config['r']} and lora_alpha={config['lora_alpha']}, which give no "
            "scaling. r must be at least 1 and both of them finite; export the adapter with "
            "trl_lora_sync.export_adapter."
        )
    return alpha / (sqrt(rank) if config.get("use_rslora") else rank)


# All versions of a run have one header. The worker knows what it has placed by the identity of this result.
@lru_cache(maxsize=2)
def _content_of(head: Head) -> Content:
    pairs: dict[str, dict[str, TensorSpan]] = defaultdict(dict)
    content = Content({}, {}, {})
    for name, entry in head.content()[1].items():
        path = name.removeprefix(_PREFIX)
        module, _, what = path.rpartition(".")
        span = _span(name, entry, head.size, is_matrix=what == "weight" and ".lora_" in path)
        # PEFT saves every tensor under this prefix, so a key without it is of another format.
        if path == name:
            raise _unknown(name)
        if what == "weight" and module.endswith((".lora_A", ".lora_B")):
            pairs[module[: -len(".lora_A")]][module[-1]] = span
        elif path.endswith(".lora_magnitude_vector.weight"):
            content.magnitudes[module.removesuffix(".lora_magnitude_vector")] = span
        elif path.endswith(".lora_B.bias"):
            content.tensors[f"{module.removesuffix('.lora_B')}.bias"] = ("added", span)
        elif what == "trainable_tokens_delta" and len(span.shape) == 2:
            content.tensors[f"{module.removesuffix('.token_adapter')}.weight"] = ("rows", span)
        # Keys with `lora_` that are left are forms that are unknown here, and may not replace a tensor.
        elif what in ("weight", "bias") and "lora_" not in path:
            content.tensors[path] = ("value", span)
        else:
            raise _unknown(name)
    if not pairs and not content.tensors:
        raise AdapterFileError("The adapter holds no tensors.")
    # After the loop above, as a file may list its tensors in any order.
    for module, pair in pairs.items():
        if pair.keys() != {"A", "B"} or pair["A"].shape[0] != pair["B"].shape[1] or pair["A"].dtype != pair["B"].dtype:
            raise AdapterFileError(f"lora_A and lora_B of {module!r} do not belong together: {pair}.")
        content.modules[module] = (pair["A"], pair["B"])
    for module, span in content.magnitudes.items():
        if module not in content.modules or span.shape != (2, content.modules[module][1].shape[0]):
            raise AdapterFileError(f"The magnitudes of {module!r} do not belong to its lora_B: {span}.")
    return content


def _unknown(name: str) -> AdapterFileError:
    return AdapterFileError(
        f"The adapter holds {name!r}, which fused serving does not know. Export the adapter with this package, in the "
        "version that the server has."
    )


def _tokens_in(config: dict[str, Any], content: Content) -> dict[str, tuple[int, list[int]]]:
    """Raises one of `MALFORMED` or AdapterFileError for rows that are not listed rightly."""
    listed = config.get(TOKENS_KEY) or {}
    tokens = {
        f"{module}.weight": (int(rows), [int(one) for one in indices]) for module, (rows, indices) in listed.items()
    }
    counts = {name: span.shape[0] for name, (kind, span) in content.tensors.items() if kind == "rows"}
    are_right = {name: len(indices) for name, (_, indices) in tokens.items()} == counts and all(
        # A row that is listed twice would get one value or the other, as the device happens to write them.
        len(set(indices)) == len(indices) and all(0 <= one < rows for one in indices)
        for rows, indices in tokens.values()
    )
    if not are_right:
        raise AdapterFileError(
            f"The adapter replaces {counts} rows of embeddings, and its configuration lists others in {TOKENS_KEY!r}."
        )
    return tokens


def tensor_name(name: str) -> str:
    """The checkpoint's name of what changes: a tensor's own, and of a module its weight."""
    return name if name.endswith((".weight", ".bias")) else f"{name}.weight"


def _span(name: str, entry: Any, size: int, *, is_matrix: bool) -> TensorSpan:
    try:
        span = TensorSpan.of(entry)
        if span.end > size:
            raise AdapterFileError(
                f"The tensor {name!r} ends at {span.end} of {size} bytes of tensors; the file was {CUT_OFF}."
            )
        dimensions = (2,) if is_matrix else (1, 2)
        if len(span.shape) not in dimensions or min(span.shape) < 1 or not span.fits(size):
            raise ValueError
    except (KeyError, ValueError, TypeError) as error:
        raise AdapterFileError(
            f"The tensor {name!r} of the adapter cannot be used: {entry!r} in a file of {size} bytes of tensors. A "
            "matrix in float32, bfloat16 or float16 was expected."
        ) from error
    return span
