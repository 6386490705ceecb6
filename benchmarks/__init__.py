"""What the package costs, beside its peers; each module is run with `python -m benchmarks.NAME`."""
