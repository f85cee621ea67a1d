"""Profiler of resource-utility curves: `python -m spaceserve.profile --model-path ...`."""
