"""What knows the package transformers: rules of its layers, folders and configurations of cut models."""
