"""What is looked back at, and what goes.

`audit` reads events and adds up; `ephemeral` expires weights that nobody keeps, and `garbage` deletes what no row names.
"""
