"""The learning problem and its clients: model, loss, metrics, data sets, partitions, clients."""
