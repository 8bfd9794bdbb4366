"""The command line: each command in its own file, registered in app.py."""
