"""Generation in the trainer's own process: `vllm_mode="colocate"`, the default of TRL."""
