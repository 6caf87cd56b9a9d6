"""The benchmark of not tuning: one method without any setting against tuned rivals."""
