"""Replicas and pipeline stages around a tensor-parallel model: states, schedules as data, and their simulation."""
