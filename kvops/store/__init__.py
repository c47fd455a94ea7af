"""The pool's runtime: a pure core, and the master, store node and client around it."""
