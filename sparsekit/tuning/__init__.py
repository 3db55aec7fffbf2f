"""Tuning of any program from the shell: `sparsekit tune`. A bandit chooses values, a regular expression reads the score."""
