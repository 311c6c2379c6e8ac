"""What is known of the arms without TRL, whose import takes as long as a server takes to read a model."""

BY_FILE = "runtime by file"
ARMS = ("weights", "async trainer", "runtime", BY_FILE, "fused")
OURS = ("runtime", "fused")
# Their server serves as that of `runtime` does.
SERVED_AS_RUNTIME = ("async trainer", BY_FILE)
# Of the prompts of a GRPO step.
STEP_PROMPT_TOKENS = 64


def why_left_out(name: str, device: str, gpus: int, workers: int) -> str | None:
    """Why an arm cannot run here."""
    if name != "weights":
        return None
    if device == "cpu":
        return "vLLM's weight transfer for other processes runs on NCCL, which needs CUDA"
    return None if gpus > workers else "NCCL needs one GPU for the trainer and others for the server"


def server_kind(arm: str) -> str:
    return "runtime" if arm in SERVED_AS_RUNTIME else arm


def server_number(arm: str) -> int:
    """Distinguishes equal servers. Two trainers of ours would take each other's slots on one server."""
    return int(arm == BY_FILE)
