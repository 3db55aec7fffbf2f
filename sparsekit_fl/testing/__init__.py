"""Contract suites that the author of a plug-in inherits: a subclass in a test file runs them all."""
