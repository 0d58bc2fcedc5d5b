"""What measures: benchmarks, the simulator with its replays, and workloads."""
