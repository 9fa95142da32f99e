"""The algorithms of a distributed product, one file each; `registry` lists them."""
