"""Workloads for a server or an engine: lengths, arrivals, shared prefixes and traces, drawn from a seed.

Every draw starts from `random.Random(text)` and uses only its `random()`, the one method whose sequence Python promises
never to change: a seed gives the same workload on every version and platform.
"""
