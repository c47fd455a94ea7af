"""Collection: the only part that reads a live machine."""
