"""Just-in-time compilation of the CPU's kernels: `compiler` compiles and loads, `store` keeps machine code on disk,
`workers` are processes that compile in parallel.  Importing this package imports nothing."""
