"""Replicas and pipeline stages around a model: its states, and what they hold."""
