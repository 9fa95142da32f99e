"""The algorithms of a distributed product, a file each; `registry` names them all."""
