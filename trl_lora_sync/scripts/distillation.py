"""TRL's own script for distillation with this package's classes; `trl-lora-sync distillation` launches it."""

from trl_lora_sync import DistillationConfig, DistillationTrainer
from trl_lora_sync.scripts import functions_of

make_parser, main = functions_of("distillation", DistillationConfig, DistillationTrainer)

if __name__ == "__main__":
    main()
