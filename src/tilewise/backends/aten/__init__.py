"""torch's own CPU flash kernel."""
