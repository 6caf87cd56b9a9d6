"""`python -m benchmarks.judge`, see `benchmarks/judge/runs.py`."""

from benchmarks.judge.runs import main  # not here, because spawned processes do not find this module by its name

if __name__ == "__main__":
    main()
