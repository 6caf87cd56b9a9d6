"""Data: files and sets, partitions over clients, and corruption on purpose."""
