"""The report: one self-contained HTML page about attention on this machine. Everything it shows is computed in Python."""
