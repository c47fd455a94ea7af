"""Faults on purpose: what was promised, what was injected, what clients saw, what that proves."""
