"""Starting ranks: MPI libraries, launchers, cores and the environment of a rank."""
