"""Faults that are proved, undone and proved gone."""
