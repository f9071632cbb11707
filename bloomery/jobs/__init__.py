"""Processes of managed jobs, clients of the public API like everybody's.

`runner` takes jobs that wait and gives each a process; that (`process`) does what the job's method says (`supervised`, `preferring`, `distilled`, and
`reinforced` with what is `rewarding`), measures what came of it (`comparison`) and keeps a few answers (`samples`), looks at what becomes of it
meanwhile (`served`), and tells the server (`reporting`), which may have it pause or end whatever it waits for (`steering`). `tracking` tells trackers
elsewhere (`trackers`) what the server was told. Whoever of them dies is replaced: the job's run knows what was done.
"""
