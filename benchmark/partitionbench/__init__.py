"""Parts of benchmark/gpu_partition.py: a module for each section, what they share, and the table."""
