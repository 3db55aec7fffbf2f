"""`python -m sparsekit`: the command, where the folder of console scripts is not on the path."""

from sparsekit.cli.main import main

if __name__ == "__main__":
    main()
