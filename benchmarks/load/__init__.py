"""The parts of benchmarks over HTTP: servers, CPU time, GPU and tables."""
