"""A whole pool in one process under virtual time: its real cores, a modelled network, disk and etcd, seeded faults."""
