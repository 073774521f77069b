"""Small PTX programs that measure one GPU; `benchmarks.microbenchmarks` runs them."""
