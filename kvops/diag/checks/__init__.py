"""The checks, one family a file: pure functions over facts."""
