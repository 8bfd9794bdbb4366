"""Attention tile by tile in plain torch."""
