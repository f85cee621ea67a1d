"""Serving benchmark: stored traces replayed against pairs of servers on one GPU (entry point: ../serve_bench.py)."""
