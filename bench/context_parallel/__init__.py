"""The parts of bench/context_parallel.py."""
