"""Workloads against any OpenAI-compatible server."""
