"""Which recipe for this lag, length, group size and compute: exact merit joined with throughput."""
