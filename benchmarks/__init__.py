"""Side-by-side measurements, run by `make bench`; see docs/benchmarks.md."""
