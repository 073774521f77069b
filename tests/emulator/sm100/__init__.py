"""CuTe-DSL programs of the emulator's tests, for sm_100; imported only to compile them."""
