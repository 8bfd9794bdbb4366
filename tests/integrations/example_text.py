"""What examples are trained on where losses are compared. The documents of the repository change, and so does their loss."""

TEXT = b"Exact attention, computed tile by tile. " * 40
