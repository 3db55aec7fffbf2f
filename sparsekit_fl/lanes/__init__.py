"""Several clients in one training step: their tensors lie side by side in lanes, as the first axis of every tensor."""
