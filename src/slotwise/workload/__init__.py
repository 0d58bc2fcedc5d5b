"""What is asked of a server or an engine: lengths, arrivals, shared prefixes and traces, drawn from a seed.

Every draw starts from `random.Random(text)` and uses nothing of it but `random()`, the one method whose sequence Python
promises never to change: a seed means the same workload on every version and platform.
"""
