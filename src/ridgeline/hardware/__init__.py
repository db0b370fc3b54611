"""What accelerators can do (table), what this machine is (probe), and how fast it really reads memory (bandwidth)."""
