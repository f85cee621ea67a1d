"""Parts of benchmark/mps_faults.py: the load on a server under test, and how it is watched."""
