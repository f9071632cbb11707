"""Graders: `graders` keeps them under their names and grades by them, with programs in the jail of this server and `asked_models` as judges.

Those are its `own_models`, and models elsewhere, behind `endpoints`. `calibrations` measures graders by what people say, of two answers by
`preferences`, and knows which may gate.
"""
