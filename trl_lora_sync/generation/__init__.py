"""What TRL calls to sample: what all ways share, sampling on servers, rollouts, and overlap with the training."""
