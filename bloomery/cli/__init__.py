"""The command line: one file per noun; `main` puts them together and turns errors into one line."""
