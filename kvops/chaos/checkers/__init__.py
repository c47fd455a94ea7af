"""Promises checked over a recorded history, one a file; pure functions of a ``RunRecord``."""
