"""`python -m tilewise` is the command `tilewise`."""

from tilewise.cli import main

if __name__ == "__main__":
    main()
