"""The servers of a run: each as a state machine, all of them as one, and which version each of them has."""
