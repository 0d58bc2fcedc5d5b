"""What the operating system gives: files, child processes, the host, the terminal."""
