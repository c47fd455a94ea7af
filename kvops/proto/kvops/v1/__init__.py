"""Generated: the control plane, version 1."""
