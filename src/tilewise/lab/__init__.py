"""The laboratory: one bench engine, the simulator and the report."""
