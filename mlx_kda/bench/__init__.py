"""Benchmarks: ours beside every peer that can run here, in one run, interleaved."""
