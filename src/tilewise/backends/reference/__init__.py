"""Standard attention: the whole score matrix at once."""
