"""TRL's own `trl grpo` script with this package's classes; `trl-lora-sync grpo` launches it."""

from trl_lora_sync import GRPOConfig, GRPOTrainer
from trl_lora_sync.scripts import functions_of

make_parser, main = functions_of("grpo", GRPOConfig, GRPOTrainer)

if __name__ == "__main__":
    main()
