"""TRL's own `trl rloo` script with this package's classes; `trl-lora-sync rloo` launches it."""

from trl_lora_sync import RLOOConfig, RLOOTrainer
from trl_lora_sync.scripts import functions_of

make_parser, main = functions_of("rloo", RLOOConfig, RLOOTrainer)

if __name__ == "__main__":
    main()
