"""Measuring: interleaved runs, medians with spread, and no speed for a wrong result."""
