"""`python -m sparsekit` runs the command, also if the folder of console scripts is not on the path."""

from sparsekit.cli.main import main

if __name__ == "__main__":
    main()
