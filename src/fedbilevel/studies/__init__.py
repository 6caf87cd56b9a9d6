"""Studies: comparisons, searches of settings, and experiments of papers from files."""
