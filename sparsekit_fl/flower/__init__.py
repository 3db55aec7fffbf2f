"""Flower: `app` is the app that `sparsekit run --engine flower` and `sparsekit flower-app` use, and `engine` its engine."""
