# The command line: one module per subcommand, each with add_arguments(parser) and run(args), loaded when it is chosen.
# May import every other package.
# Next: main.py.
