"""Text to token ids and back, the chat template included."""
