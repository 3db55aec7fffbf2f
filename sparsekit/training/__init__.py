"""Train a sparse model that is physically narrow, and learn which units stay."""
