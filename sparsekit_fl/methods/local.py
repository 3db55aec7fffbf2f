"""Local training: each client alone, with the schedule of the federated methods. The baseline to beat.

On clients that hold few classes it is a strong rival, so every table should show it.
"""

from sparsekit_fl.methods.method import Method
from sparsekit_fl.policies import Nothing


def local() -> Method:
    """Nothing is shared; a client goes on from its own last state whenever it is sampled, and deploys that.

    `personal=LocalModel`, `personal.select=best` deploys the best of its models on its own validation data.
    """
    return Method(name="local", source="no federation", share=Nothing())
