"""Steps of programs other than the library, priced: programs as data, one path for papers, rows of a file, and searches."""
