"""What is known of SGLang without asking a server. Needs no torch."""

from packaging.version import Version

from trl_lora_sync.engines.spec import EngineSpec
from trl_lora_sync.versions import KnownVersions

_OLDEST = Version("0.5.11")
SGLANG = EngineSpec(
    name="sglang",
    versions=KnownVersions(title="SGLang", oldest=_OLDEST, newest=Version("0.5.23"), run=("0.5.15", "0.5.17")),
    description=f"an SGLang server of {_OLDEST} or later",
    distributions=("sglang",),
    api_key_variable="SGLANG_API_KEY",
    own_route="/model_info",
    version_route="/server_info",
    guards_version=True,
    engine="trl_lora_sync.engines.sglang.engine:SGLangEngine",
    launch="trl_lora_sync.cli.launch_sglang:plan_sglang",
    capabilities={"requires_packed_modules": True, "rejects_shape_mismatch": False, "supports_tensor_load": True},
    max_loras_flag="--max-loras-per-batch",
    counts_base=True,
    processed_logprobs="Restart the server without SGLANG_RETURN_ORIGINAL_LOGPROB.",
)
