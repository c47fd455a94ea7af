"""The command line: one command a file, imported on use."""
