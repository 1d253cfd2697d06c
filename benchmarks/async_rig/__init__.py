"""Parts of benchmarks/async.py: a clock that jumps (virtual_time), the workload (workload), the run on it (virtual), real processes (real)."""
