"""Contract suites: the author of a plug-in inherits a class and supplies one fixture. They need pytest."""
