"""What is learned, and by whom: model, loss, metrics, data, clients."""
