"""Bytes between processes: the wire's frames, authentication, gRPC plumbing."""
