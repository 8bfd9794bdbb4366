"""Every model type transformers knows, at a tiny random configuration: tilewise beside eager."""
