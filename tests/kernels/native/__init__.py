"""Native kernels equal the reference bit for bit, on any thread, at any CPU level, in any process."""
