"""`flashdsa-compare`: FlashDSA beside other libraries, on the same inputs, checked before timed.

docs/benchmarks.md says how to read and repeat its table.
"""
