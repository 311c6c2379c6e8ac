"""The `trl-lora-sync` command. Importing it, and its `--help`, load neither torch nor TRL."""
