"""Predicted times: the operations of a dry run, priced on a described cluster. Starts no MPI."""
