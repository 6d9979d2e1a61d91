"""Model configuration, layers, the decoder and the loaders of its weights."""
