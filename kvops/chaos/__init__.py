"""Breaks the pool on purpose: in a simulator under virtual time, where every failure replays exactly."""
