"""What survives: rows in SQL, operations and results in journals, payloads in blobs.

`rows` names the tables, `database` owns the one writer, `journal` keeps a run's history, `blobs` keeps everything large.
Only services open rows and journals; the engine writes blobs.
"""
