"""The command line of the core.

Wrong input of a user is an `InvalidValueError` or another `SparsekitError`: `main` prints it in one line and ends with exit
code 2.
"""

from sparsekit.cli.output import (
    AsJson,
    command_app,
    command_line,
    log_to,
    print_json,
    print_lines,
    print_table,
    print_wrapped,
    with_options,
)

__all__ = [
    "AsJson",
    "command_app",
    "command_line",
    "log_to",
    "print_json",
    "print_lines",
    "print_table",
    "print_wrapped",
    "with_options",
]
