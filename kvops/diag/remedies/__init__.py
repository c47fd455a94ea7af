"""What an operator types for each check: data of the playbooks, one file a family."""
