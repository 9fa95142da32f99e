"""Pipelines around a tensor-parallel model: schedules as data, and their simulation."""
