"""The portable GPU backend: one set of Triton kernels, complete in features, for every GPU that Triton serves."""
