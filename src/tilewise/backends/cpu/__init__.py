"""Exact attention on a CPU: LLVM IR generated from Python, compiled for the machine it runs on."""
