"""Parts of the documentation that are made from the code, so that they cannot go stale.

A page has `<!-- made: NAME -->` where one of `MADE` goes, behind words for a reader of the file: the support table,
the messages of all errors, the help of each command, and SECURITY.md, which is thus written once. The settings and
other tables of `WRITTEN` stand in the pages themselves, up to `<!-- end -->`; this file, run as a program, writes them.
"""

import ast
import contextlib
import dataclasses
import inspect
import io
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

from trl_lora_sync import errors
from trl_lora_sync.adapter.experts import FAMILIES, Family
from trl_lora_sync.adapter.support import supported_features
from trl_lora_sync.cli.main import COMMANDS, TRAINING, main
from trl_lora_sync.engines.registry import ENGINES
from trl_lora_sync.versions import PEFT, TRL

PACKAGE = Path(errors.__file__).parent
_HELP_WIDTH = "80"  # as much as a page shows without scrolling; typer takes it from the terminal otherwise
# With what a reader of the file itself sees in its place.
_MARK = re.compile(r"(?:\*[^*\n]+\* )?<!-- made: ([a-z-]+) -->")

# What the engines do with an adapter as PEFT saves it, where that is not the right thing. Read in their sources for
# vLLM 0.22 to 0.33 and SGLang 0.5.11 to 0.5.23; the patterns were run on vLLM 0.31.
_ENGINES = ("vLLM 0.22 to 0.31", "vLLM 0.32 to 0.33", "SGLang 0.5.11 to 0.5.23")
# Fields that take any value here because something else is looked at instead.
_VALUES = {"peft_type": "`LORA`; other types are refused by their class"}
_OTHER_POLICY, _SERVER_EXITS, _REFUSED = "another policy, silently", "the server exits", "refused"
AS_PEFT_SAVES_IT: dict[str, tuple[str, str, str]] = {
    "use_rslora": ("right", "right", _OTHER_POLICY),
    "rank_pattern": (_OTHER_POLICY, "right", _SERVER_EXITS),
    "alpha_pattern": (_OTHER_POLICY, "right", _OTHER_POLICY),
    "init_lora_weights": (f"{_OTHER_POLICY} if the base was rewritten", "refused, but not LoRA-GA", _OTHER_POLICY),
    "use_dora": (_REFUSED, _REFUSED, "refused, up to 0.5.12 ignored"),
    "bias": (_REFUSED, _REFUSED, "corrupt, or the server exits"),
    "lora_bias": ("refused, 0.31 drops it", _REFUSED, _SERVER_EXITS),
    "modules_to_save": (_REFUSED, _REFUSED, "skipped silently, or the server exits"),
    "trainable_token_indices": (_REFUSED, _REFUSED, "skipped silently"),
    "alora_invocation_tokens": (_OTHER_POLICY, _REFUSED, _OTHER_POLICY),
    "layer_replication": (_OTHER_POLICY, _REFUSED, _REFUSED),
    "use_qalora": ("refused, or another policy", _REFUSED, "not checked"),
    "use_bdlora": ("not checked", _REFUSED, "not checked"),
    "target_parameters": (_OTHER_POLICY, "depends on the model", "not checked"),
    "target_modules": ("right", "right", "refused as a pattern; the server exits on some parts of q/k/v or gate/up"),
}


# Tests beside the test of the decision about each field: of what is then served, with values that are not zero.
_EXPORTED = "unit/test_adapter_export.py::test_plain_peft_computes_the_training_models_logits_from_the_export"
_REFUSED_WITH_REASON = (
    "unit/test_adapter_support.py::test_field_that_no_server_serves_exactly_is_refused_with_its_reason"
)
_FUSED = "live/test_fused_extras.py::test_the_server_samples_from_what_is_trained"
PROOFS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        (
            "alpha_pattern", "exclude_modules", "fan_in_fan_out", "layers_to_transform", "lora_alpha", "r",
            "rank_pattern", "use_rslora",
        ),
        (_EXPORTED,),
    ),
    **dict.fromkeys(
        (
            "alora_invocation_tokens", "arrow_config", "bias", "ensure_weight_tying", "kasa_config",
            "layer_replication", "loftq_config", "megatron_config", "monteclora_config", "use_bdlora",
            "use_qalora", "velora_config",
        ),
        (_REFUSED_WITH_REASON,),
    ),
    "init_lora_weights": (
        "unit/test_adapter_initial.py::test_plain_peft_on_the_checkpoints_base_computes_what_the_trained_model_does",
        "live/test_initialisations.py::test_a_run_trains_the_policy_it_samples_from_and_the_servers_base_stays",
    ),
    "lora_bias": (_REFUSED_WITH_REASON, "live/test_fused_extras.py::test_a_bias_is_added_to_that_of_the_layer"),
    "lora_dropout": (
        "unit/test_adapter_support.py::test_dropout_is_accepted_with_the_advice_to_leave_it_out",
        "unit/test_adapter_export.py::test_dropout_is_that_of_the_active_adapters_layers_as_they_are_now",
    ),
    "modules_to_save": (_REFUSED_WITH_REASON, f"{_FUSED}[modules_to_save]"),
    "peft_type": ("unit/test_adapter_support.py::test_peft_type_other_than_lora_is_refused_by_name",),
    "target_modules": (
        _EXPORTED,
        "unit/test_adapter_support.py::test_adapter_on_the_embedding_or_the_output_head_is_refused",
        f"{_FUSED}[embeddings]",
    ),
    "target_parameters": (
        _REFUSED_WITH_REASON,
        "unit/test_adapter_experts.py::test_a_server_adds_to_each_expert_what_peft_merges_into_it",
        "live/test_fused_experts.py::test_experts_and_routers_are_served_as_they_are_trained",
    ),
    "trainable_token_indices": (_REFUSED_WITH_REASON, f"{_FUSED}[tokens]"),
    "use_dora": (_REFUSED_WITH_REASON, f"{_FUSED}[DoRA]"),
}  # fmt: skip

# The advice for a message without one.
_LAST_RESORT = "Run `trl-lora-sync doctor URL`, and read the server's log."
FIXES = {
    "LoRASyncError": "A method was called too early. A trainer calls the methods in the right order.",
    "DeadlineExceededError": "The server is busy or stuck: read its log, then raise the setting in parentheses.",
    "RemoteProcessError": "Read the output of process 0, which has the exception itself.",
    "GenerationError": "The server, or a proxy before it, sent an invalid answer: read its log.",
    "UnsupportedSettingError": "Correct the named [setting](settings.md).",
    "AdapterRejectedError": "The adapter does not fit the served model. Run `trl-lora-sync doctor URL --adapter DIR`.",
}


def support_table() -> str:
    """Every field of `LoraConfig`, what this package does with it in both ways of serving, and what proves it."""
    fused = supported_features("fused")
    rows = [
        f"| `{name}` | {_VALUES.get(name, _cell(treatment))} | {_beside(treatment, fused[name])} "
        f"| {' | '.join(_alone(name, treatment))} | {'<br>'.join(f'`{test}`' for test in proofs_of(name))} |"
        for name, treatment in sorted(supported_features().items())
    ]
    columns = " | ".join(f"{engine} alone" for engine in _ENGINES)
    return "\n".join(
        [
            f"| `LoraConfig` field | applied at run time | fused serving | {columns} | test |",
            "|" + "---|" * (4 + len(_ENGINES)),
            *rows,
        ]
    )


def _beside(treatment: str, fused: str) -> str:
    """What fused serving does with a field, given what serving at run time does."""
    return "the same" if fused == treatment else _cell(fused)


def _alone(name: str, treatment: str) -> tuple[str, ...]:
    """What each engine does with an adapter as PEFT saves it."""
    unknown = "not checked" if treatment.startswith("refused: ") else "right"
    return AS_PEFT_SAVES_IT.get(name, (unknown,) * len(_ENGINES))


def proofs_of(name: str) -> list[str]:
    """The tests that hold a row of the table, by their paths below `tests`."""
    decision = "unit/test_adapter_support.py::test_field_that_is_refused_is_refused_with_its_own_reason"
    return [decision, *PROOFS.get(name, ())]


# What holds the rows of the experts in each way of serving.
_EXPERTS_AT_RUN_TIME = "unit/test_adapter_experts.py::test_a_server_adds_to_each_expert_what_peft_merges_into_it"
_EXPERTS_FUSED = "live/test_fused_experts.py::test_experts_and_routers_are_served_as_they_are_trained"
_ROUTER_REFUSED = "unit/test_adapter_experts.py::test_a_router_that_vllm_ignores_is_refused_with_what_to_set"
_ROUTER_SERVED = "unit/test_adapter_experts.py::test_the_router_of_a_mixtral_is_served_under_its_name"
_STACKED_ONLY = (
    "unit/test_adapter_experts.py::test_fused_serving_refuses_a_family_whose_checkpoints_have_all_experts_in_one_tensor"
)
_ON_SGLANG = "unit/test_adapter_experts.py::test_sglang_gets_each_expert_in_a_tensor_even_where_vllm_takes_all_in_one"


def experts_table() -> str:
    """What is served of each family of mixtures of experts, in both ways, and what proves it."""
    head = "| `model_type` | trained | applied at run time | fused serving | SGLang | test |"
    rows = [row for name, family in sorted(FAMILIES.items()) for row in _expert_rows(name, family)]
    return "\n".join([head, "|" + "---|" * 6, *rows])


def _expert_rows(name: str, family: Family) -> list[str]:
    moe, (gate, up, down) = family.moe, family.projections
    one_by_one = "" if family.is_always_stacked else f"as `{moe}.experts.N.{gate}`, `{up}`, `{down}`"
    fused = one_by_one or "refused: its checkpoints have all experts in one tensor"
    at_run_time = f"{one_by_one}, or all in one tensor" if one_by_one else f"all in one tensor of `{moe}.experts`"
    router = f"as `{moe}.gate`" if family.has_router else "refused: vLLM 0.26 ignores it, without an error"
    fused_router = f"as `{moe}.gate`" if one_by_one else "refused"
    fused_test = _EXPERTS_FUSED if one_by_one else _STACKED_ONLY
    tests = (_EXPERTS_AT_RUN_TIME, fused_test, _ON_SGLANG)
    router_tests = (_ROUTER_SERVED if family.has_router else _ROUTER_REFUSED, fused_test)
    return [
        f"| `{name}` | experts | {at_run_time} | {fused} | served | {_tests(tests)} |",
        f"| `{name}` | router | {router} | {fused_router} | refused | {_tests(router_tests)} |",
    ]


def _tests(names: tuple[str, ...]) -> str:
    return "<br>".join(f"`{name}`" for name in names)


def version_table() -> str:
    """The versions of the engines and libraries, and how they are known."""
    lines = ["| software | run with this release | known from its source |", "|---|---|---|"]
    lines += [
        f"| {one.title} | {', '.join(one.run)} | {one.oldest} to {one.newest} |"
        for one in (*(spec.versions for spec in ENGINES.values()), TRL, PEFT)
    ]
    return "\n".join(lines)


def settings_table() -> str:
    """The fields of `LoRASyncConfig`, which all of this package's configurations have beside TRL's."""
    from trl_lora_sync.config import LoRASyncConfig

    lines = ["| field | default | meaning |", "|---|---|---|"]
    ours = dataclasses.fields(LoRASyncConfig)
    lines += [f"| `{field.name}` | `{field.default!r}` | {field.metadata['help']} |" for field in ours]
    return "\n".join(lines)


def command_help() -> str:
    """The output of `--help`, for all commands except training commands, whose help differs in their names only."""
    names = [name for name in COMMANDS if name not in TRAINING]
    return "\n\n".join([_help(), *(f"## {name}\n\n{_help(name)}" for name in names)])


def grpo_help() -> str:
    """The output of `grpo --help`."""
    return _help("grpo")


def _help(*command: str) -> str:
    with mock.patch.dict(os.environ, COLUMNS=_HELP_WIDTH), contextlib.redirect_stdout(io.StringIO()) as said:
        main([*command, "--help"])
    return f"```text\n{said.getvalue().rstrip()}\n```"


def error_reference() -> str:
    """Every error class with the messages it is raised with."""
    messages = collect_messages()
    parts = []
    for name, found in inspect.getmembers(errors, inspect.isclass):
        if not issubclass(found, errors.LoRASyncError):
            continue
        parts.append(f"### {name}\n\n{inspect.getdoc(found)}\n")
        if rows := messages.get(name):
            lines = ["| you see | cause and fix |", "|---|---|"]
            for first, rest in map(split, rows):
                if not rest or rest.startswith("The server answered"):
                    rest = f"{FIXES.get(name, _LAST_RESORT)} {rest}"
                lines.append(f"| {_cell(first)} | {_cell(rest.strip())} |")
            parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def security_policy() -> str:
    """SECURITY.md without its title, which the page has, and with links from the folder of the pages."""
    policy = (Path(__file__).parents[1] / "SECURITY.md").read_text().partition("\n")[2].strip()
    return policy.replace("](docs/", "](")


MADE: Mapping[str, Callable[[], str]] = {
    "support": support_table,
    "experts": experts_table,
    "versions": version_table,
    "settings": settings_table,
    "commands": command_help,
    "grpo": grpo_help,
    "errors": error_reference,
    "security": security_policy,
}

# Short enough to be read in the file, and the same with every version of the libraries.
WRITTEN = ("settings", "versions", "experts")
_WRITTEN = re.compile(rf"(<!-- made: ({'|'.join(WRITTEN)}) -->\n).*?(<!-- end -->)", re.DOTALL)


def written(page: str) -> str:
    """The text of a page with the tables of `WRITTEN` as the code has them now."""
    return _WRITTEN.sub(lambda found: f"{found[1]}{MADE[found[2]]()}\n{found[3]}", page)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for each page."""
    return _MARK.sub(lambda found: found[0] if found[1] in WRITTEN else MADE[found[1]](), markdown)


# Messages in the source


def sources(root: Path = PACKAGE) -> list[Path]:
    """The files that a run of a user may execute; not `trl_lora_sync.testing`, which stands in for servers."""
    return [file for file in sorted(root.rglob("*.py")) if file.parent != PACKAGE / "testing"]


def collect_messages(root: Path = PACKAGE) -> dict[str, list[str]]:
    """Class name to the messages it is raised with; what differs from case to case is `…`.

    A message that a helper puts together from its arguments is taken once for each call of the helper.
    """
    trees = [ast.parse(file.read_text()) for file in sources(root)]
    texts = {name: found for tree in trees for name, found in _text_functions(tree).items()}
    texts |= {"_key_words": [text for tree in trees for text in _text_functions(tree).get("_key_words", [])]}
    # Several files may call one helper; of two with the same name, a file means its own.
    shared = {name: found for tree in trees for name, found in _helpers(tree)}
    inside = {id(node) for tree in trees for _, (helper, _) in _helpers(tree) for node in ast.walk(helper)}
    messages: dict[str, list[str]] = {}
    for tree in trees:
        constants = _constants(tree)
        helpers = shared | dict(_helpers(tree))
        for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
            name = _called(call)
            if name in helpers:
                helper, raised = helpers[name]
                given = constants | _bound(helper, call, constants)
                messages.setdefault(_called(raised), []).append(_text(raised.args[0], given))
            elif name in _ERROR_NAMES and call.args and id(call) not in inside:
                first = call.args[0]
                called = _called(first) if isinstance(first, ast.Call) else ""
                messages.setdefault(name, []).extend(texts.get(called) or [_text(first, constants)])
    return {name: sorted({text for text in found if text.strip("… .")}) for name, found in messages.items()}


_ERROR_NAMES = {
    name for name, one in inspect.getmembers(errors, inspect.isclass) if issubclass(one, errors.LoRASyncError)
}


def _constants(tree: ast.Module) -> dict[str, str]:
    """Module-level names that are text."""
    return {
        node.targets[0].id: _text(node.value, {})
        for node in tree.body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }


def _text_functions(tree: ast.Module) -> dict[str, list[str]]:
    """Functions that return one text."""
    return {
        node.name: [_text(node.body[-1].value, _constants(tree))]
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and isinstance(node.body[-1], ast.Return)
        and isinstance(node.body[-1].value, ast.JoinedStr)
    }


def _helpers(tree: ast.Module) -> Iterator[tuple[str, tuple[ast.FunctionDef, ast.Call]]]:
    """Functions that do nothing but return an error made of their arguments."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.args.args:
            last = node.body[-1]
            plain = all(isinstance(one, ast.Assign | ast.Expr) for one in node.body[:-1])
            made = last.value if isinstance(last, ast.Return) else None
            if plain and isinstance(made, ast.Call) and made.args and _called(made) in _ERROR_NAMES:
                yield node.name, (node, made)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def _bound(helper: ast.FunctionDef, call: ast.Call, constants: Mapping[str, str]) -> dict[str, str]:
    names = [argument.arg for argument in helper.args.args if argument.arg != "self"]
    defaults = dict(zip(reversed(names), reversed(helper.args.defaults), strict=False))
    values = defaults | dict(zip(names, call.args, strict=False))
    values |= {one.arg: one.value for one in call.keywords if one.arg}
    return {name: _text(value, constants) for name, value in values.items()}


def _text(node: ast.expr | None, names: Mapping[str, str]) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part, names) for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return _text(node.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "rstrip":
        return _text(node.func.value, names)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        template = _text(node.func.value, names)
        for part in node.args:
            template = template.replace("{}", _text(part, names), 1)
        return template
    return names.get(node.id, "…") if isinstance(node, ast.Name) else "…"


def split(message: str) -> tuple[str, str]:
    """The first sentence, and the rest."""
    first, end, rest = re.sub(r"\s+", " ", message).strip().partition(". ")
    return first + ("." if end else ""), rest


def _cell(text: str) -> str:
    """Text of a table; what stands in backquotes stays code."""
    parts = text.split("`")
    return "`".join(part if place % 2 else re.sub(r"([<>*_|])", r"\\\1", part) for place, part in enumerate(parts))


if __name__ == "__main__":
    for path in Path(__file__).parents[1].glob("docs/*.md"):
        path.write_text(written(path.read_text()))
