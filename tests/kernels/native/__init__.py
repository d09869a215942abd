"""Native kernels equal the reference bit for bit, on any thread, for any instruction set, in any process."""
