"""The command line of the core.

What a user wrote that cannot be meant is an `InvalidValueError` or another `SparsekitError`, wherever it is found: `main`
prints it in one line and ends with exit code 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekit.lazy import lazy_names

if TYPE_CHECKING:
    from sparsekit.cli.output import (
        AsJson as AsJson,
    )
    from sparsekit.cli.output import (
        command_app as command_app,
    )
    from sparsekit.cli.output import (
        log_to as log_to,
    )
    from sparsekit.cli.output import (
        print_json as print_json,
    )
    from sparsekit.cli.output import (
        print_lines as print_lines,
    )
    from sparsekit.cli.output import (
        print_table as print_table,
    )
    from sparsekit.cli.output import (
        print_wrapped as print_wrapped,
    )
    from sparsekit.cli.output import (
        with_options as with_options,
    )

_HOMES = {
    "sparsekit.cli.output": "AsJson command_app log_to print_json print_lines print_table print_wrapped with_options",
}
__all__, __getattr__ = lazy_names(__name__, _HOMES)
