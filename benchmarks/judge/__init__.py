"""An external judge: problems and measures of benchopt's benchmark_bilevel with one client, beside its solvers."""
