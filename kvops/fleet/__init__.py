"""Groups of processes: where they are, how they start and stop."""
