"""What is looked back at, and what goes.

`audit` reads events and adds up; `ephemeral` expires weights that nobody keeps, `garbage` deletes what no row names, and `chains` claims what
rows need of the chains of runs.
"""
