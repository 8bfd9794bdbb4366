"""What users call; the names are offered by the package itself."""
