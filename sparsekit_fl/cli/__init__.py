"""The commands that federated learning adds to `sparsekit`: they parse, call one function and print."""
