"""Graders: what scores an output. Code of users runs jailed, in processes that share nothing with the server.

`GradeInput` and `GradeResult` (`types/grading`) are what every kind is given and gives.
"""
