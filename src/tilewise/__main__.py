"""`python -m tilewise` is the command `tilewise`."""

from tilewise.cli.app import main

if __name__ == "__main__":
    main()
