"""What survives: rows in SQL, operations and results in journals, payloads in blobs.

`rows` holds the tables, by whom they are for, `database` owns the one writer, `journal` keeps a run's history, `blobs` keeps everything large, and
`objects` is what machines share; `patience` gives up what a file system does not answer.
Only services open rows and journals; the engine writes blobs.
"""
