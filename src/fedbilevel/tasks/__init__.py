"""Tasks: a problem with its data, ready to run. One file each, found by discovery."""
