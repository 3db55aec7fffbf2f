"""The server: assigning, checking and aggregating, and the loop over rounds."""
