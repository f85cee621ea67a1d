"""Parts of benchmark/simulate_twsrft.py: the simulation, and its tables and plots."""
