"""Arithmetic over lists of tensors, one call for a whole list: what a step of an optimiser or a mean of models is made of.

These are operators of torch by public names. A name that ends in `_` changes the tensors of the first list.
"""

from sparsekit import _torch

__all__ = [
    "foreach_add",
    "foreach_add_",
    "foreach_copy_",
    "foreach_lerp_",
    "foreach_mul",
    "foreach_mul_",
    "foreach_norm",
    "foreach_sub",
    "foreach_zero_",
]

foreach_add = _torch.foreach_add
"""Add a number, or the tensors of a second list times `alpha`."""
foreach_add_ = _torch.foreach_add_
"""Add in place."""
foreach_copy_ = _torch.foreach_copy_
"""Copy the tensors of a second list."""
foreach_lerp_ = _torch.foreach_lerp_
"""Move towards the tensors of a second list by a share of the way."""
foreach_mul = _torch.foreach_mul
"""Multiply by a number, or by the tensors of a second list."""
foreach_mul_ = _torch.foreach_mul_
"""Multiply in place."""
foreach_norm = _torch.foreach_norm
"""The norm of each tensor, L2 unless told."""
foreach_sub = _torch.foreach_sub
"""Subtract a number, or the tensors of a second list."""
foreach_zero_ = _torch.foreach_zero_
"""Fill with zeros."""
