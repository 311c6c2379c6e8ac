"""What must be true of a server: one list for the start of a run, for a server that came back, and for `doctor`."""
