"""The groups of trained modules that a server may apply or ignore independently: attention, MLP, experts, router.

An effect of the whole adapter does not prove each of them. vLLM 0.26 serves the attention of a Mixtral while it ignores
adapters on the experts, without an error.
"""

import re
from collections.abc import Iterable, Mapping

# The group of a module is the first one here whose pattern matches a component of its path.
# Experts and routers are inside the MLP, and connectors inside what Qwen calls visual, so they come first.
_GROUPS = (
    ("vision connector", re.compile(r"merger|merger_list|deepstack_merger_list|multi_modal_projector")),
    ("vision tower", re.compile(r"visual|vision_tower|vision_model")),
    ("embeddings", re.compile(r"embed_tokens|lm_head|wte|wpe|embed_in|embed_out")),
    # The whole component must match: `gate` is a router, and `gate_proj` belongs to the MLP.
    ("router", re.compile(r"router|gate|shared_expert_gate")),
    ("experts", re.compile(r"experts?|shared_experts?")),
    ("attention", re.compile(r".*(attn|attention).*")),
    ("MLP", re.compile(r"mlp|feed_forward|ffn|block_sparse_moe")),
)
_OTHERS = "other"


def group_of(path: str) -> str:
    """The group of a module, by its path in the model."""
    parts = path.split(".")
    return next((group for group, known in _GROUPS if any(map(known.fullmatch, parts))), _OTHERS)


def sees_images(group: str) -> bool:
    """Whether a prompt of text alone shows nothing of the modules of a group."""
    return group.startswith("vision")


def without_numbers(paths: Iterable[str]) -> list[str]:
    """`model.layers.0.mlp` and `model.layers.1.mlp` as one, in order."""
    return list(dict.fromkeys(re.sub(r"\.\d+(?=\.|$)", ".*", path) for path in paths))


def experts_note(paths: Iterable[str], groups: Mapping[str, Iterable[str]]) -> str | None:
    """What is trained of a mixture of experts; None for another model.

    Args:
        paths: of all modules of the model.
        groups: the trained modules, by their groups.
    """
    if not any(path.endswith(".experts") or ".experts." in path for path in paths):
        return None
    trained = ", ".join(
        f"{group} ({', '.join(sorted({path.rpartition('.')[2] for path in modules}))})"
        for group, modules in groups.items()
    )
    left = [group for group in ("attention", "experts", "router") if group not in groups]
    rest = f" Not trained: {', '.join(left)}." if left else ""
    return f"LoRA adapter sync: the model is a mixture of experts. Trained: {trained}.{rest}"
