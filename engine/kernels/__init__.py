"""Device kernels of the GPU engine: the interface, a plain torch reference, and Triton."""
