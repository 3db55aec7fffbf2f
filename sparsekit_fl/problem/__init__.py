"""What is learned, and by whom: model, loss, metrics, data sets, partitions, clients."""
