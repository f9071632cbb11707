"""Evaluations: `evaluations` makes and shows them, `running` works at them in the background, asking through `answering` and grading by the graders
of this server. `questions` is what rows ask, `items` what those of OpenAI's evals do, `evaluation_rows` what is kept of it, `results` the
figures that come of it, `paired` where two models differ, row by row, `counts` how many there are; `evals` has all of that as OpenAI's contract does.
"""
