"""What a host is, as checks see it."""
