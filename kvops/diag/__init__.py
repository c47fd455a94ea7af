"""
Diagnosis of the whole RDMA path: collect once, then parse and check as pure functions of what was
collected.
"""
