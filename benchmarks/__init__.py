"""How fast the library is, as ratios to stated floors. Not part of the installed package: `python -m benchmarks` from the top of a checkout."""
