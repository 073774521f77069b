"""Build time: the CuTe-DSL kernels, the compiler that turns them into cubins, and their proof."""
