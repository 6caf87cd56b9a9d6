"""Benchmarks of the library, as ratios to stated floors.

They are not part of the installed package: run `python -m benchmarks` in the root of a checkout.
"""
