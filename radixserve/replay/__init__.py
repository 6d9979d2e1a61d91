"""Replay of recorded requests through the K/V cache, without a model."""
