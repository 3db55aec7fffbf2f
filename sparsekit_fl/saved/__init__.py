"""What a finished run left, put to use: models to load, to predict with and to export."""
